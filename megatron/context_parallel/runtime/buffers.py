"""Buffers for the chunks of a tensor."""

from functools import lru_cache

import torch
from torch import Tensor

from megatron.context_parallel.plan.ir import PARTIAL, T

Value = tuple[Tensor, ...]  # a chunk of a tensor, as `T` says


def empty(tensor: T, rows: int, sizes: tuple[int, ...], like: Tensor) -> Value:
    """A chunk of some rows with nothing in it; folded, as the executor has it.

    Args:
        sizes: batch x key/value heads, query heads of each of them, d and dv.
        like: with the device and the dtype of queries, keys and values. Partials, log-sum-exp and delta are in float32
            or wider.
    """
    return tuple([like.new_empty(shape, dtype=dtype) for shape, dtype in _parts(tensor, rows, sizes, like.dtype)])


@lru_cache(1024)
def _parts(
    tensor: T, rows: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of what a chunk consists of."""
    batch, group, d, dv = sizes
    wide = torch.promote_types(dtype, torch.float32)
    own = wide if tensor in PARTIAL else dtype
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
