"""A rank's device on an emulated cluster: a call of the attention kernel takes its time, by sleeping."""

from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from megatron.context_parallel.cluster.description import BACKWARD, Device
from megatron.context_parallel.cluster.simulate.block_time import CallTime
from megatron.context_parallel.kernels.interface import BlockGrad, Kernel, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, Piece, PieceMask, Runs
from tools.netlab import Busy


class EmulatedDevice:
    """Takes the time of calls of the attention kernel.

    Args:
        device: the description.
        dtype: of the model, such as "bf16".
        head_dim: of queries, keys and values.
        busy: passes a number of seconds.

    Attributes:
        computes: True: kernels compute, to be checked. False: they take the device's time and return zeros.
        seconds: the time that the calls have taken on the device since it was last set to 0.
    """

    def __init__(self, device: Device, dtype: str, head_dim: int, busy: Busy) -> None:
        self.call_time, self.head_dim, self.busy = cache(CallTime(device, dtype, head_dim)), head_dim, busy
        self.computes = True
        self.seconds = 0.0

    def call(
        self, heads: int, queries: int, keys: int, mask: PieceMask, backward: bool
    ) -> AbstractContextManager[None]:
        """The time of a call, in which its results are made.

        Args:
            heads: query heads times batch.
            queries, keys: rows.
            mask: of these rows.
            backward: whether the call computes gradients.
        """
        operations = 4 * self.head_dim * heads * seen_pairs(queries, keys, mask) * (BACKWARD if backward else 1)
        seconds = self.call_time(mask == CAUSAL, queries, keys, operations, backward)
        self.seconds += seconds
        return self.busy(seconds)


def seen_pairs(queries: int, keys: int, mask: PieceMask) -> float:
    """Pairs of rows that the mask does not empty; of a causal square half of all, as in `AttentionRate`."""
    if isinstance(mask, Runs):
        seen = (mask.end - mask.first).clamp(min=0)
        return seen.sum().item() / len(seen)
    return queries * keys / 2 if mask == CAUSAL else float(queries * keys)


class DeviceKernel:
    """`kernels.Kernel`: another kernel while the device computes; else zeros after the time of the device."""

    def __init__(self, kernel: Kernel, device: EmulatedDevice) -> None:
        self.kernel, self.device = kernel, device

    def pieces(self, block: Runs, keys: int) -> list[Piece]:
        return self.kernel.pieces(block, keys)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        if self.device.computes:
            return self.kernel.forward(q, k, v, mask, scores)
        with self.device.call(q.shape[1] * q.shape[2], len(q), len(k), mask, backward=False):
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=torch.float32)

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        if self.device.computes:
            return self.kernel.backward(grad, scores)
        q, k, v = grad.q, grad.k, grad.v
        with self.device.call(q.shape[1] * q.shape[2], len(q), len(k), grad.mask, backward=True):
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
