"""A rank's part of a batch."""

from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel


def shard_batch(batch: dict[str, Tensor], cp: ContextParallel) -> dict[str, Tensor]:
    """This rank's tokens of every tensor [b, length, ...] of a batch: [b, length / n, ...] in local order."""
    return {name: cp.shard(x, dim=1) for name, x in batch.items()}
