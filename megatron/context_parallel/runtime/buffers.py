"""Buffers for the chunks of a tensor."""

from functools import lru_cache

import torch
from torch import Tensor

from megatron.context_parallel.plan.ir import PARTIAL, T

Value = tuple[Tensor, ...]  # a chunk of a tensor, with the contents in `T`


def empty(tensor: T, rows: int, sizes: tuple[int, ...], like: Tensor, narrow: bool = False) -> Value:
    """An empty chunk with some rows, folded as in the executor.

    Args:
        sizes: batch x key/value heads, query heads per key/value head, d and dv.
        like: a tensor with the device and dtype of queries, keys and values. Partials, log-sum-exp and delta are in
            float32 or wider.
        narrow: partials have the dtype of `like`, as those that are sent in 16 bits. Log-sum-exp and delta do not.
    """
    parts = _parts(tensor, rows, sizes, like.dtype, narrow)
    return tuple([like.new_empty(shape, dtype=dtype) for shape, dtype in parts])


@lru_cache(1024)
def _parts(
    tensor: T, rows: int, sizes: tuple[int, ...], dtype: torch.dtype, narrow: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of the tensors in a chunk."""
    batch, group, d, dv = sizes
    wide = torch.promote_types(dtype, torch.float32)
    own = wide if tensor in PARTIAL and not narrow else dtype
    queries, outputs, by_row = ((rows, batch, group, d), own), ((rows, batch, group, dv), own), (rows, batch, group)
    match tensor:
        case T.KV | T.DKV:
            return [((rows, batch, d), own), ((rows, batch, dv), own)]
        case T.Q | T.DQ:
            return [queries]
        case T.O:
            return [outputs, (by_row, wide)]  # log-sum-exp
        case _:
            return [queries, outputs, (by_row, wide), (by_row, wide)]  # log-sum-exp and delta
