"""A rank's part of a batch."""

from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.tokens.documents import Documents, placement_of


def shard_batch(batch: dict[str, Tensor], cp: ContextParallel, documents: Documents | None = None) -> dict[str, Tensor]:
    """This rank's tokens of every tensor [b, length, ...] of a batch: [b, length / n, ...] in local order.

    If `documents` have a placement, the samples are laid end to end: [1, b * length / n, ...].
    """
    if placement_of(documents):
        batch = {name: x.flatten(0, 1).unsqueeze(0) for name, x in batch.items()}
    return {name: cp.shard(x, dim=1, documents=documents) for name, x in batch.items()}
