"""What Gemma's layers do beside those of Llama: norms behind attention and MLP, and two rotary bases."""

import math
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .norm import Norm


class RowParallelLinearWithNorm(RowParallelLinear):
    """The last projection of attention or MLP, and the norm of its output."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **given: Any) -> None:
        super().__init__(input_size, output_size, config=config, **given)
        self.post_norm = Norm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The normalized output [..., output_size], with the bias in it."""
        out, bias = super().forward(x)
        return self.post_norm(out if bias is None else out + bias), None


class SelfAttentionWithOwnAngles(SelfAttention):
    """Self-attention that gets the rotary angles of layers without and with a window, and takes its own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As in megatron-core. `rotary_pos_emb` is [rows, 1, 1, 2 d]: the angles without a window, then with one."""
        if rotary_pos_emb is not None:
            rotary_pos_emb = _halves(rotary_pos_emb)[self.core_attention.window != (-1, -1)]
        return super().forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **named)


_kept = WeakTensorKeyDictionary()  # so that all layers have the same tensors, whose cos and sin are kept once


def _halves(angles: Tensor) -> tuple[Tensor, ...]:
    if angles not in _kept:
        _kept[angles] = angles.chunk(2, dim=-1)
    return _kept[angles]


def scale_embeddings(model: GPTModel) -> None:
    """Makes `model` multiply token embeddings by the square root of their width, rounded to their dtype."""
    factor = math.sqrt(model.config.hidden_size)

    def scale(module: torch.nn.Module, args: tuple, out: Tensor) -> Tensor:
        return out * torch.tensor(factor, dtype=out.dtype)  # on the host: a GPU takes a number without a copy

    model.embedding.register_forward_hook(scale)
