"""Context groups that are made when they are first needed, and those of the layers of a model."""

from collections.abc import Sequence
from functools import lru_cache

import torch.distributed as dist

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.strategies import Choice, check_same_tokens, distinct


@lru_cache(8)
def context_of(group: dist.ProcessGroup, strategy: str) -> ContextParallel:
    """The context group of a process group and a spec: the same one for all layers, for it holds communicators."""
    return ContextParallel(strategy, group=group)


def contexts_by_layer(choices: Sequence[Choice], group: dist.ProcessGroup) -> list[ContextParallel]:
    """A context group for the strategy of each layer (`choose_by_layer`); layers of one strategy share one.

    All ranks of the group call it together.

    Raises:
        UsageError: a rank would not hold the same tokens in all layers.
    """
    check_same_tokens(choices, dist.get_world_size(group))
    made = {choice.spec: ContextParallel(choice, group=group) for choice in distinct(choices)}
    return [made[choice.spec] for choice in choices]
