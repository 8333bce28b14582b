"""The MLP of each layer, computed again in the backward pass, for some tokens at a time."""

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute_mlps(model: GPTModel, chunks: int) -> None:
    """Makes every MLP of `model` compute `chunks` parts of the sequence in turn (`--mlp-chunks-for-training`).

    The backward pass computes a part again, so that one part's activations are alive at any time. One part is
    `--recompute-modules mlp`: megatron-core's own does not end if the MLP has a bias.
    """
    for module in model.modules():
        if isinstance(module, MLP):
            module.forward = partial(_in_chunks, module.forward, chunks)


def _in_chunks(forward: Any, chunks: int, hidden: Tensor, **others: Any) -> tuple[Tensor, Tensor | None]:
    # A reentrant checkpoint would add to the weights' gradients once for each part, and start their reduction early.
    run = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **others)
    parts = [run(part) for part in hidden.chunk(chunks)]
    return torch.cat([out for out, _ in parts]), parts[0][1]  # the bias is the same for all
