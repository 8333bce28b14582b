"""Context groups that are made when they are first needed."""

from functools import lru_cache

import torch.distributed as dist

from ..context import ContextParallel


@lru_cache(8)
def context_of(group: dist.ProcessGroup, strategy: str) -> ContextParallel:
    """The context group of a process group and a spec: the same one for all layers, for it holds communicators."""
    return ContextParallel(strategy, group=group)
