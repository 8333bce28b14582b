"""YaRN (arXiv 2309.00071): rotary frequencies for sequences longer than those of the pretraining.

megatron-core has them too. Its module stores cos and sin of all pretrained positions, in its own layout.
"""

import math

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


def use_yarn(
    model: GPTModel, base: float, factor: float, original: int, beta_fast: float, beta_slow: float, rounded: bool
) -> None:
    """Gives the rotary embedding of `model` YaRN's frequencies. `rotary_scale` of its configuration goes with them.

    Args:
        model: a model with rotary embeddings, before `use_layout`.
        base: the rotary base.
        factor: how much longer sequences get.
        original: the tokens of a sequence in the pretraining.
        beta_fast, beta_slow: frequencies with more turns than the first in `original` tokens are kept, those with
            fewer than the second are divided by `factor`, and between them is a ramp.
        rounded: the ramp begins and ends at a whole dimension.
    """
    rope = model.rotary_pos_emb
    width = 2 * len(rope.inv_freq)
    powers = base ** (torch.arange(0, width, 2, dtype=torch.float32, device=rope.inv_freq.device) / width)
    kept = 1 - _ramp(*_range(width, base, original, beta_fast, beta_slow, rounded), width // 2).to(powers.device)
    rope.inv_freq = 1 / (factor * powers) * (1 - kept) + 1 / powers * kept


def _range(
    width: int, base: float, original: int, beta_fast: float, beta_slow: float, rounded: bool
) -> tuple[float, float]:
    """The dimensions whose frequencies turn `beta_fast` and `beta_slow` times in `original` tokens."""
    low, high = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (beta_fast, beta_slow)
    )
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, width - 1)


def _ramp(low: float, high: float, dimensions: int) -> Tensor:
    """0 up to dimension `low`, 1 from `high` on, float32 [dimensions]."""
    if low == high:
        high += 0.001  # as in the original, against a division by zero
    return ((torch.arange(dimensions, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
