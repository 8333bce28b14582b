"""How long the blocks of a plan take on a device."""

import math
from functools import cache

import numpy
import torch

from ..layout import Chunks
from ..mask import Mask
from ..plan.ir import Attend, Plan
from ..plan.volume import Shape
from .description import AttentionRate, Device

SAMPLES = 32  # queries of a progression that stand for the others
BACKWARD = 2.5  # products of matrices for one of the forward pass


class BlockTime:
    """Seconds of the blocks of one pass.

    Args:
        device: computes them.
        plan: the pass.
        shape: the sizes on a rank.
        mask, length: the mask and tokens of the sequence.
        dtype: of the model, such as "bf16".
    """

    def __init__(self, device: Device, plan: Plan, shape: Shape, mask: Mask, length: int, dtype: str) -> None:
        self.device, self.backward = device, plan.backward
        self.rates = _nearest(device.attention, dtype, shape.head_dim)
        self.mask, self.chunks = mask, Chunks.of(plan.layout, plan.n, length)
        self.keys = numpy.array([p for chunk in self.chunks.progressions for p in chunk]).T
        self.rows = length / plan.n
        heads = shape.heads / plan.heads * (shape.rows * plan.size / length)  # times batch
        self.operations = 2 * heads * (shape.head_dim + (shape.value_dim or shape.head_dim))  # a seen pair of rows
        numbers = heads * self.rows * shape.head_dim
        keys = 2 * numbers * max(shape.kv_heads, plan.heads) / shape.heads
        # A block's result is added to the partial: two reads and a write of float32.
        self.adding = 12 * (numbers + (keys if plan.backward else 0)) / (device.memory_GB_s * 1e9)
        self.seen = cache(self._seen)

    def __call__(self, attend: Attend) -> float:
        """Seconds of a block."""
        return sum(self._of(q, attend.kv_chunks) for q in attend.q_chunks)

    def _of(self, q: int, kv_chunks: tuple[int, ...]) -> float:
        share = sum(self.seen(q)[list(kv_chunks)])
        if not share:
            return 0.0
        operations = self.operations * share * self.rows**2 * (BACKWARD if self.backward else 1)
        rate = self._rate(self.rows * math.sqrt(len(kv_chunks)))
        return self.device.block_us * 1e-6 + operations / rate + self.adding

    def _rate(self, rows: float) -> float:
        """Operations a second of a block of `rows` queries and keys, between the sizes that were measured."""
        known = [rate.backward_TFLOP_s if self.backward else rate.forward_TFLOP_s for rate in self.rates]
        return 1e12 * float(numpy.interp(math.log(rows), [math.log(rate.rows) for rate in self.rates], known))

    def _seen(self, q: int) -> numpy.ndarray:
        """The share of pairs of rows that query chunk q sees, of each key chunk."""
        total = numpy.zeros(self.chunks.n)
        for rows in self.chunks.progressions[q]:
            count = min(SAMPLES, rows.length)
            places = torch.tensor([int((i + 0.5) * rows.length / count) for i in range(count)])
            first, end = (bound[0].numpy() for bound in self.mask.seen(rows.start + places * rows.stride))
            weight = rows.length / count / self.rows**2
            seen = (self._before(end) - self._before(first)).clip(0).sum(0)
            total += weight * seen.reshape(self.chunks.n, -1).sum(1)
        return total.round(3)

    def _before(self, bound: numpy.ndarray) -> numpy.ndarray:
        """How many keys of each progression are before each bound, [bounds, progressions of all chunks]."""
        start, stride, length = self.keys
        return (-((start - bound[:, None]) // stride)).clip(0, length)


def _nearest(rates: tuple[AttentionRate, ...], dtype: str, head_dim: int) -> list[AttentionRate]:
    """The rates of the dtype and head_dim measured that are nearest to those asked for, by rows."""
    best = min(rates, key=lambda rate: (rate.dtype != dtype, abs(rate.head_dim - head_dim)))
    like = [rate for rate in rates if (rate.dtype, rate.head_dim) == (best.dtype, best.head_dim)]
    return sorted(like, key=lambda rate: rate.rows)
