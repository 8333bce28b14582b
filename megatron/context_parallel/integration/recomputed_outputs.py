"""The output of recomputed layers: in the backward pass only its gradient is needed, and that only by the MLP."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer import TransformerLayer
from torch import Tensor


def free_outputs(model: GPTModel, each: int) -> None:
    """Full recomputation of groups of `each` layers keeps no output of a group, which no gradient depends on.

    The gradient of the output is freed as soon as the MLP of the group's last layer, with its residual, is
    differentiated. Megatron's checkpoint would keep it until the whole group is.
    """
    for layer in model.decoder.layers[each - 1 :: each]:
        ends = _Ends()
        layer.pre_mlp_layernorm.register_forward_pre_hook(ends.before_mlp)
        layer.register_forward_hook(ends.after_layer)


class _Ends:
    """The end of a layer while it is recomputed and differentiated, with the gradient of its output."""

    def __init__(self) -> None:
        self._gradient: Tensor | None = None

    def before_mlp(self, norm: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        if _recomputes() and inputs[0].requires_grad:
            inputs[0].register_hook(self._free)

    def after_layer(self, layer: TransformerLayer, inputs: Any, outputs: tuple) -> tuple | None:
        if not _recomputes():
            return None
        hidden, *others = outputs
        return _WithoutValues.apply(hidden, self._keep), *others

    def _keep(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def _free(self, of_input: Tensor) -> None:
        """Gets the whole gradient of the input of MLP and residual."""
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            return
        storage = gradient.untyped_storage()
        whole = storage.nbytes() == gradient.nbytes
        if whole and storage.data_ptr() != of_input.untyped_storage().data_ptr():
            storage.resize_(0)  # the checkpoint and autograd hold the tensor, but read it no more


def _recomputes() -> bool:
    return is_checkpointing() and torch.is_grad_enabled()


class _WithoutValues(torch.autograd.Function):
    """One zero in the shape of x, with its gradient, which `keep` is given too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Any) -> Tensor:
        ctx.keep = keep
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.keep(gradient)
        return gradient, None
