"""Excludes the rows that pad a vocabulary for tensor parallelism from the loss and the initialization."""

import math
import random

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

_BLOCK = 256  # rows drawn at once


def leave_out_padding(model: GPTModel, vocabulary: int) -> None:
    """Set the logits of tokens from `vocabulary` on to -inf: softmax ignores them, and their rows get no gradient."""

    def hide(layer: ColumnParallelLinear, inputs: object, output: tuple[Tensor, Tensor | None]) -> None:
        logits = output[0]
        columns = logits.shape[-1]
        first = 0 if columns == layer.output_size else layer.tp_group.rank() * columns
        with torch.no_grad():  # the gradient of a logit of -inf is already 0
            logits[..., max(0, vocabulary - first) :].fill_(-math.inf)

    model.vocabulary = vocabulary
    if model.post_process:
        model.output_layer.register_forward_hook(hide)


@torch.no_grad()
def draw_rows(weight: Tensor, first: int, vocabulary: int, std: float, seed: str) -> None:
    """Draw the rows `first`, `first` + 1, ... [rows, width] of a table of `vocabulary` rows; rows beyond it become 0.

    A row depends only on `seed` and its number, not on the rows of the rank or the padding.
    """
    weight.zero_()
    end = max(first, min(first + len(weight), vocabulary))
    generator = torch.Generator(weight.device)
    seeds = random.Random(seed).getrandbits(31)
    for start in range(first // _BLOCK * _BLOCK, end, _BLOCK):
        generator.manual_seed(seeds + start // _BLOCK)
        block = torch.empty(_BLOCK, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
        block.normal_(0.0, std, generator=generator)
        here = range(max(start, first), min(start + _BLOCK, end))
        weight[here.start - first : here.stop - first] = block[here.start - start : here.stop - start]
