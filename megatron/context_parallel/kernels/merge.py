"""Merging partial outputs of attention over disjoint sets of keys (Attention2D section 3.1; Milakov & Gimelshein)."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges a second partial output into the first, in place.

    Args:
        out: [..., d] (on a GPU [s, B, G, d]), float32 or wider; rows whose `lse` is -inf have seen no key and
            may hold anything finite.
        lse: [...], log-sum-exp of the scores behind `out`.
        other_out: like `out`, in any dtype.
        other_lse: like `lse`.
    """
    if out.is_cuda and out.dtype is torch.float32:
        from .merge_triton import merge_fused

        return merge_fused(out, lse, other_out, other_lse)
    other_lse = other_lse.to(lse.dtype)
    # The weights of the two are a softmax over their log-sum-exps; a row unseen by both keeps what it has.
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(0.0)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)
