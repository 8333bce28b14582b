"""Merging partial outputs of attention over disjoint sets of keys (Attention2D section 3.1; Milakov & Gimelshein)."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges a second partial output into the first, in place.

    Args:
        out: [..., d] (on a GPU [s, B, G, d]), float32 or wider; rows whose `lse` is -inf have seen no key and
            may contain any finite values.
        lse: [...], log-sum-exp of the scores of `out`. Keep it in float64 over several merges: float32 rounds a value
            of 14 by up to 5e-7, and each merge changes the weights by as much.
        other_out: like `out`, in any dtype.
        other_lse: like `lse`.

    The weight of each side keeps all its digits, however small it is. Rows without keys on both sides keep their `out`.
    """
    if out.is_cuda and out.dtype is torch.float32 and len(out):
        from .merge_triton import merge_fused

        return merge_fused(out, lse, other_out, other_lse)
    other_lse = other_lse.double()
    # Two sigmoids, because 1 - weight would lose all digits of a small weight. A finite bound for -inf makes the
    # weights 1 and 0 where both are -inf, while NaN stays NaN. Rounding the gap changes an output by less than its own
    # rounding.
    gap = lse.clamp_min(torch.finfo(lse.dtype).min).sub_(other_lse).type_as(out).unsqueeze_(-1)
    out.mul_(gap.sigmoid())
    out.addcmul_(other_out if other_out.dtype is out.dtype else other_out.type_as(out), gap.neg_().sigmoid_())
    torch.logaddexp(lse, other_lse, out=lse)
