"""delta = rowsum(dO·O), and how it is passed to backward passes that take the output instead."""

import math

import torch
from torch import Tensor

from .names import DELTA_AT_ONCE


def delta_of(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """The row sums of dout * out, both [s, ..., d], as [s, ...] in `dtype`. Of some rows at a time there are copies."""
    delta = out.new_empty(out.shape[:-1], dtype=dtype)
    rows = max(1, DELTA_AT_ONCE // (dtype.itemsize * max(1, math.prod(out.shape[1:]))))
    for into, gradients, values in zip(*(x.split(rows) for x in (delta, dout, out)), strict=True):
        torch.sum(gradients.to(dtype) * values.to(dtype), -1, out=into)
    return delta


def output_with(delta: Tensor, dout: Tensor) -> Tensor:
    """A substitute for the output [..., d] with rowsum(dout * out) = `delta`, in dout's dtype.

    Backward passes of flash attention read the output only in that sum. The substitute is the multiple of dout with
    this sum. So it is never larger than the output's projection on dout, and has the same rounding error.

    Args:
        delta: [...], float32 or wider.
        dout: [..., d] (on a GPU [s, B, G, d]); rows of zeros get zeros, because their delta is 0.
    """
    if dout.is_cuda:
        from .delta_triton import output_with_fused

        return output_with_fused(delta, dout)
    norm = torch.linalg.vector_norm(dout, dim=-1, dtype=torch.float64)  # the squares may overflow float32
    factor = delta / norm.square().clamp_min(torch.finfo(torch.float64).tiny)
    largest = torch.finfo(delta.dtype).max
    factor = factor.clamp(-largest, largest).to(delta.dtype)
    return torch.mul(dout, factor.unsqueeze(-1), out=torch.empty_like(dout))
