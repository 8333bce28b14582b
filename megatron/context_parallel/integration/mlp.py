"""The MLP of each layer, computed again in the backward pass, for some tokens at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute_mlps(model: GPTModel, chunks: int, output_unused: bool) -> None:
    """Makes every MLP of `model` compute `chunks` parts of the sequence in turn (`--mlp-chunks-for-training`).

    The backward pass computes a part again, so that one part's activations are alive at any time. One part is
    `--recompute-modules mlp`: megatron-core's own does not end if the MLP has a bias. With `output_unused`, no gradient
    depends on the output of an MLP in a recomputed layer. So that layer does not compute it.
    """
    for module in model.modules():
        if isinstance(module, MLP):
            module.forward = _InChunks(module, chunks, output_unused)  # type: ignore[method-assign]


class _InChunks:
    """The forward function of an MLP."""

    def __init__(self, mlp: MLP, chunks: int, output_unused: bool) -> None:
        self._mlp, self._forward = mlp, mlp.forward
        self._chunks, self._output_unused = chunks, output_unused

    def __call__(self, hidden: Tensor, **others: Any) -> tuple[Tensor, Tensor | None]:
        if self._output_unused and is_checkpointing() and torch.is_grad_enabled():
            return self._without_output(hidden)
        # A reentrant one would add to the weights' gradients once for each part, and start their reduction early.
        run = partial(checkpoint, self._forward, use_reentrant=False, preserve_rng_state=False, **others)
        parts = [run(part) for part in hidden.chunk(self._chunks)]
        return torch.cat([out for out, _ in parts]), parts[0][1]  # the bias is the same for all

    def _without_output(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Zeros with the gradients of the output, and the bias, which a row is computed for."""
        with torch.no_grad():
            row, bias = self._forward(hidden[:1])
        weights = [weight for weight in self._mlp.parameters() if weight.requires_grad]
        out = row.new_zeros(()).expand(len(hidden), *row.shape[1:])
        return _ZerosWithGradients.apply(self._first, self._chunks, hidden, out, *weights), bias

    def _first(self, hidden: Tensor) -> Tensor:
        return self._forward(hidden)[0]


class _ZerosWithGradients(torch.autograd.Function):
    """Zeros in place of run(hidden), whose gradients the backward pass computes for some of the rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], chunks: int, hidden: Tensor, out: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.run, ctx.chunks, ctx.weights = run, chunks, weights
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(ctx.weights)
        for part, of_part, of_out in zip(*(x.chunk(ctx.chunks) for x in (hidden, of_hidden, gradient)), strict=True):
            sums = _add_gradients(ctx.run, ctx.weights, part, of_part, of_out, sums)
        return None, None, of_hidden, None, *sums


def _add_gradients(
    run: Callable[[Tensor], Tensor],
    weights: tuple[Tensor, ...],
    part: Tensor,
    of_part: Tensor,
    of_out: Tensor,
    sums: list[Tensor | None],
) -> list[Tensor | None]:
    """Writes the gradient of a part into `of_part`, and adds those of the weights to `sums`, where they have any."""
    given = part.detach().requires_grad_()
    with torch.enable_grad():
        out = run(given)
    found, *others = torch.autograd.grad(out, (given, *weights), of_out, allow_unused=True)
    of_part.copy_(found)
    return [one if total is None else total.add_(one) for total, one in zip(sums, others, strict=True)]
