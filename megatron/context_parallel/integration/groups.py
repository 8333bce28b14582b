"""Context groups that are created when first needed, and the context groups of the layers of a model."""

from collections.abc import Sequence
from functools import lru_cache

import torch.distributed as dist

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.strategies import Choice, check_same_tokens, distinct


@lru_cache(8)
def context_of(group: dist.ProcessGroup, strategy: str) -> ContextParallel:
    """The context group of a process group and a spec. All layers share it, because it holds communicators."""
    return ContextParallel(strategy, group=group)


def contexts_by_layer(choices: Sequence[Choice], group: dist.ProcessGroup) -> list[ContextParallel]:
    """A context group for the strategy of each layer (`choose_by_layer`). Layers with the same strategy share one.

    All ranks of the group call it together.

    Raises:
        UsageError: a rank would not hold the same tokens in all layers.
    """
    check_same_tokens(choices, dist.get_world_size(group))
    made = {choice.spec: ContextParallel(choice, group=group) for choice in distinct(choices)}
    return [made[choice.spec] for choice in choices]
