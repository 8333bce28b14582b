"""Giving delta to backward passes that ask for the output."""

import torch
from torch import Tensor


def output_with(delta: Tensor, dout: Tensor) -> Tensor:
    """A stand-in for the output [..., d] whose rowsum(dout * out) is `delta`; in dout's dtype.

    Backward passes of flash attention read the output only in that sum. The stand-in is the multiple of dout that has
    it, so it is never larger than the output's projection on dout, and as good after rounding as the output itself.

    Args:
        delta: [...], float32 or wider.
        dout: [..., d] (on a GPU [s, B, G, d]); rows of zeros get zeros, as their delta is 0.
    """
    if dout.is_cuda:
        from .delta_triton import output_with_fused

        return output_with_fused(delta, dout)
    norm = torch.linalg.vector_norm(dout, dim=-1, dtype=torch.float64)  # whose squares float32 may not hold
    factor = delta / norm.square().clamp_min(torch.finfo(torch.float64).tiny)
    largest = torch.finfo(delta.dtype).max
    factor = factor.clamp(-largest, largest).to(delta.dtype)
    return torch.mul(dout, factor.unsqueeze(-1), out=torch.empty_like(dout))
