"""Rotary embeddings that compute and keep cos and sin once for queries, keys and all layers.

megatron-core computes them again for each rotation, and autograd keeps every copy. It has no option for it.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

CHECKED = {"megatron-core": "0.16 to 0.19"}

_rotate = rope_utils._apply_rotary_pos_emb_bshd
_tables = WeakTensorKeyDictionary()  # by angles: cos and sin by dtype and version


def share_cos_and_sin() -> None:
    """Replace the rotation of queries and keys that is not fused. May be called any number of times."""
    module: Any = rope_utils
    module._apply_rotary_pos_emb_bshd = _rotate_by_shared


def _rotate_by_shared(t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *others: Any, **named: Any) -> Tensor:
    # `others` and `named` are those of latent attention, whose releases differ; they are off or 1 elsewhere.
    latent = any(value is True or value not in (False, None, 1.0) for value in (*others, *named.values()))
    # Without gradients nothing is kept.
    if latent or not torch.is_grad_enabled() or freqs.is_inference():
        return _rotate(t, freqs, rotary_interleaved, *others, **named)
    kept = _tables.setdefault(freqs, {})
    key = t.dtype, freqs._version  # angles may be overwritten in place
    if key not in kept:
        kept[key] = torch.cos(freqs).to(t.dtype), torch.sin(freqs).to(t.dtype)
    cos, sin = kept[key]
    rotated, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    rotated = rotated * cos + rope_utils._rotate_half(rotated, rotary_interleaved) * sin
    return torch.cat((rotated, rest), dim=-1)
