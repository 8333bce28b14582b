"""The loss of a GPT model, computed for some tokens at a time: the logits of all of them never exist together."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

Chunk = tuple[Tensor, Tensor, Tensor]  # hidden states [rows, b, h] of a rank, labels and weights [b, parts * rows]


class ModelWithLoss(GPTModel):
    """megatron-core's GPT model, whose last stage returns the sum of the losses if it gets a loss mask.

    Attributes:
        chunk_size: tokens whose logits exist at once (`--cross-entropy-chunk-size`). With sequence parallelism, tokens
            of all tensor-parallel ranks together.
        end: returns the sum of the losses. To Megatron-FSDP, a gradient of the last module's output begins a backward
            pass, after which it sums the gradients of all weights. The output layer's gets one for each chunk.
    """

    chunk_size: int
    post_process: bool

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.end = torch.nn.Identity()  # the last module

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """As in megatron-core. With `labels` int64 and `loss_mask` [b, s] the last stage returns sum(loss * mask) [].

        In chunks the result can be differentiated once: the forward pass computes the gradients.
        """
        call = (input_ids, position_ids, attention_mask, decoder_input, labels)
        if labels is None or loss_mask is None or not self.post_process:
            return super().forward(*call, **others)
        if labels.numel() <= self.chunk_size:
            return self.end(_weighted(super().forward(*call, **others), loss_mask))
        self.post_process = False  # stages without a loss return their hidden states
        try:
            hidden = super().forward(*call, **others)
        finally:
            self.post_process = True
        return self.end(_LossInChunks.apply(hidden, self._output_weight(), self, labels, loss_mask))

    def _output_weight(self) -> Tensor:
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def chunks(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor) -> Iterator[Chunk]:
        """Cut hidden states [s / parts, b, h], and labels and mask [b, s]; `parts` are sequence-parallel ranks."""
        parts = self.pg_collection.tp.size() if self.output_layer.sequence_parallel else 1
        rows = max(1, self.chunk_size // (parts * len(labels)))
        # The output layer gathers the chunk of each rank, so labels and mask are cut in each rank's part.
        cut = [whole.unflatten(1, (parts, -1)).split(rows, dim=2) for whole in (labels, loss_mask)]
        for states, targets, weights in zip(hidden.split(rows), *cut, strict=True):
            yield states, targets.flatten(1), weights.flatten(1)

    def chunk_loss(self, chunk: Chunk, weight: Tensor) -> Tensor:
        """The weighted sum [] of a chunk's losses; `weight` [vocabulary / tensor ranks, h] is the output layer's."""
        hidden, labels, weights = chunk
        logits, _ = self.output_layer(hidden, weight=weight)
        return _weighted(self.compute_language_model_loss(labels, logits), weights)


def _weighted(losses: Tensor, loss_mask: Tensor) -> Tensor:
    return (losses.float() * loss_mask).sum()


class _LossInChunks(torch.autograd.Function):
    """Computes a chunk's gradients right after its loss, so that its logits are computed once and freed at once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, model: ModelWithLoss, labels: Tensor, loss_mask: Tensor
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        chunks = model.chunks(hidden, labels, loss_mask)
        if not any(ctx.needs_input_grad):
            for chunk in chunks:
                total += model.chunk_loss(chunk, weight)
            return total
        scale_loss = model.config.grad_scale_func  # without it, 16-bit gradients of a loss may become 0
        scale = torch.ones_like(total)
        if scale_loss:
            scale = scale_loss(scale).reshape(())  # megatron-core's is [1]
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        of_hidden = [_differentiate(model, chunk, weight, scale, total, of_weight) for chunk in chunks]
        ctx.save_for_backward(torch.cat(of_hidden), of_weight.to(weight.dtype), scale)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, scale = ctx.saved_tensors
        factor = gradient / scale
        return of_hidden.mul_(factor), of_weight.mul_(factor), None, None, None


def _differentiate(
    model: ModelWithLoss, chunk: Chunk, weight: Tensor, scale: Tensor, total: Tensor, of_weight: Tensor
) -> Tensor:
    """Adds a chunk's loss to `total`, and its gradients times `scale` to `of_weight`; returns those of its states."""
    states = chunk[0].detach().requires_grad_()
    with torch.enable_grad():
        loss = model.chunk_loss((states, *chunk[1:]), weight)
    of_states, part = torch.autograd.grad(loss, (states, weight), scale)
    total += loss.detach()
    of_weight += part
    return of_states
