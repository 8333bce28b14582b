"""Rotary embeddings that compute and keep cos and sin once for queries, keys and all layers, and rotate in one kernel.

megatron-core computes them again for each rotation, and autograd keeps every copy. It has no option for it. Without
Transformer Engine it rotates in about six kernels on a GPU.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils, yarn_rotary_pos_embedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

CHECKED = {"megatron-core": "0.16 to 0.19"}

_rotate = rope_utils._apply_rotary_pos_emb_bshd
_scale_of = yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config
_tables = WeakTensorKeyDictionary()  # by angles: cos and sin by dtype and version


def share_cos_and_sin() -> None:
    """Replace the rotation of queries and keys that is not fused. May be called any number of times."""
    module: Any = rope_utils
    module._apply_rotary_pos_emb_bshd = _rotate_by_shared


def _rotate_by_shared(t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *others: Any, **named: Any) -> Tensor:
    # The rest of `others` and `named` is of latent attention, whose releases differ; it is off or 1 elsewhere.
    scale = named.get("mscale", 1.0)
    rest = [value for name, value in named.items() if name != "mscale"]
    latent = any(value is True or value not in (False, None, 1.0) for value in (*others, *rest))
    keeps = torch.is_grad_enabled() or t.is_cuda  # on a CPU nothing is kept without gradients
    if latent or not keeps or torch.is_inference_mode_enabled() or freqs.is_inference():
        return _rotate(t, freqs, rotary_interleaved, *others, **named)
    kept = _tables.setdefault(freqs, {})
    key = t.dtype, scale, freqs._version  # angles may be overwritten in place
    if key not in kept:
        kept[key] = (torch.cos(freqs) * scale).to(t.dtype), (torch.sin(freqs) * scale).to(t.dtype)
    cos, sin = kept[key]
    if t.is_cuda:
        return CompiledRotation.apply(t, cos, sin, rotary_interleaved)
    return rotation(t, cos, sin, rotary_interleaved)


def rotation(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Queries or keys [..., head_dim] with the first numbers of each head rotated, as many as `cos` and `sin` have."""
    rotated, others_of_head = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    rotated = rotated * cos + rope_utils._rotate_half(rotated, interleaved) * sin
    return torch.cat((rotated, others_of_head), dim=-1)


def rotation_back(gradient: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The gradient of what `rotation` rotated."""
    rotated, others_of_head = gradient[..., : cos.shape[-1]], gradient[..., cos.shape[-1] :]
    rotated = rotated * cos - rope_utils._rotate_half(rotated * sin, interleaved)
    return torch.cat((rotated, others_of_head), dim=-1)


class CompiledRotation(torch.autograd.Function):
    """`rotation` in one kernel forward and one backward. In 16 bits it rounds once, not after each product.

    The forward kernel is the same with and without gradients, so recomputation gives the same bits.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _compiled(rotation)(t.detach(), cos, sin, interleaved)  # one compilation, whether t needs gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _compiled(rotation_back)(gradients[0], *ctx.saved_tensors, ctx.interleaved), None, None, None


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)  # for a CPU it would need a C++ compiler


def rotary_scale(config: TransformerConfig) -> float:
    """The number that rotated queries and keys are multiplied by: YaRN's, or 1."""
    return _scale_of(config)
