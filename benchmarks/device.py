"""A rank's device on an emulated cluster: its work takes the time that a description gives, by sleeping."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import Workload
from megatron.context_parallel.cluster.description import BACKWARD, Device, load_cluster
from megatron.context_parallel.cluster.simulate.block_time import CallTime
from megatron.context_parallel.kernels.choose import MOST_PIECES
from megatron.context_parallel.kernels.interface import BlockGrad, Kernel, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, KeyRanges, Piece, PieceMask, cut
from tools.netlab import Busy

PYTHON = 0.03  # of the time of the device's work: the most that Python's own time may be


class EmulatedDevice:
    """Takes the time of the device's work.

    Args:
        device: the description.
        dtype: of the model, such as "bf16".
        head_dim: of queries, keys and values.
        busy: passes a number of seconds.

    Attributes:
        computes: True: kernels compute, to be checked. False: they take the device's time and return zeros.
        seconds: the time of the work since it was last set to 0.
    """

    def __init__(self, device: Device, dtype: str, head_dim: int, busy: Busy) -> None:
        self.device, self.head_dim, self.busy = device, head_dim, busy
        self.call_time = cache(CallTime(device, dtype, head_dim))
        self.computes = True
        self.seconds = 0.0

    def call(
        self, heads: int, queries: int, keys: int, mask: PieceMask, backward: bool
    ) -> AbstractContextManager[None]:
        """The time of a call of the attention kernel, in which its results are made.

        Args:
            heads: query heads times batch.
            queries, keys: rows.
            mask: of these rows.
            backward: whether the call computes gradients.
        """
        operations = 4 * self.head_dim * heads * seen_pairs(queries, keys, mask) * (BACKWARD if backward else 1)
        seconds = self.call_time(mask == CAUSAL, queries, keys, operations, backward)
        return self.work(seconds)

    def work(self, seconds: float) -> AbstractContextManager[None]:
        """The time of any work, in which its results are made."""
        self.seconds += seconds
        return self.busy(seconds)


def device_of(cluster: str | None, problem: Workload) -> EmulatedDevice | None:
    """The device of the cluster that a file describes; None without a file."""
    if cluster is None:
        return None
    return EmulatedDevice(load_cluster(cluster).device, problem.dtype, problem.head_dim, Busy())


def seen_pairs(queries: int, keys: int, mask: PieceMask) -> float:
    """Pairs of rows that the mask does not empty; of a causal square half of all, as in `AttentionRate`."""
    if isinstance(mask, KeyRanges):
        seen = (mask.end - mask.first).clamp(min=0)
        return seen.sum().item() / len(seen)
    return queries * keys / 2 if mask == CAUSAL else float(queries * keys)


class DeviceKernel:
    """`kernels.Kernel`: another kernel while the device computes; else zeros after the time of the device."""

    def __init__(self, kernel: Kernel, device: EmulatedDevice) -> None:
        self.kernel, self.device = kernel, device

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        """As on a GPU (`LibraryAndPosition`): a block of many pieces, such as of documents, is one launch."""
        found = cut(block, most=MOST_PIECES + 1)
        return found if len(found) <= MOST_PIECES else [Piece(slice(0, block.first.shape[1]), slice(0, keys), block)]

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


def python_share(short: Callable[[], object], run: Callable[[], object], device: EmulatedDevice) -> dict[str, object]:
    """Python's own time of a pass, and the device's; `failure` says why the device is too fast for Python, or is null.

    Python's time is the processor time of `short`, the same pass over a short sequence, while the device does not
    compute. `run` is the pass that is timed. Both are means over the ranks. Collective over the world.
    """
    device.computes = False
    short()  # makes the plans
    begun = time.thread_time()
    short()
    python = time.thread_time() - begun
    device.seconds = 0.0
    run()
    device.computes = True
    sums = torch.tensor([python, device.seconds], dtype=torch.float64)
    dist.all_reduce(sums)
    python, work = (sums / dist.get_world_size()).tolist()
    return {"python": {"seconds": python, "device_seconds": work}, "failure": refusal(python, work)}


def refusal(python: float, work: float) -> str | None:
    """Why devices are too fast: Python's seconds of a pass are more than PYTHON of theirs. None: they are not."""
    share = python / work
    if share <= PYTHON:
        return None
    return (
        f"Python's own time of a pass is {python * 1e3:.1f} ms, {share:.1%} of the {work * 1e3:.0f} ms of its devices "
        f"(at most {PYTHON:.0%}): make devices {share / PYTHON:.1f} times as slow, by --scale or --stands-for"
    )
