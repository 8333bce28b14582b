"""The output of recomputed layers: in the backward pass only its gradient is needed."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import Tensor


def free_outputs(model: GPTModel, each: int) -> None:
    """Full recomputation of groups of `each` layers keeps no output of a group, which no gradient depends on."""
    for layer in model.decoder.layers[each - 1 :: each]:
        layer.register_forward_hook(_without_values)


def _without_values(layer: torch.nn.Module, inputs: Any, outputs: tuple) -> tuple | None:
    if not (is_checkpointing() and torch.is_grad_enabled()):
        return None
    hidden, *others = outputs
    return _WithoutValues.apply(hidden), *others


class _WithoutValues(torch.autograd.Function):
    """One zero in the shape of x, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient
