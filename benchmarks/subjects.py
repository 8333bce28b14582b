"""The subjects of measurements behind one interface: a strategy of this project, or a peer's adapter (see `peers`)."""

import importlib
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel import ContextParallel, context_parallel_attention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.kernels.reference import attention
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.place_documents import Costs, place

from .cases import DTYPES, Case, Workload
from .device import DeviceKernel, EmulatedDevice
from .peers import PEERS
from .peers.cpu_flash import CpuFlash
from .stopwatch import Stopwatch, TimedKernel

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}  # relative error (Frobenius) of output and gradients


class Kernels(NamedTuple):
    """The kernels of a rank, whose calls count as "kernel"."""

    ours: TimedKernel
    peers: CpuFlash


def kernels_of(problem: Workload, watch: Stopwatch, device: EmulatedDevice | None) -> Kernels:
    """On an emulated cluster with devices, both can take the time of the device."""
    kernel = kernel_for(torch.device("cpu"), DTYPES[problem.dtype], problem.head_dim)
    return Kernels(block_kernel(kernel, watch, device), CpuFlash(watch, device))


def block_kernel(kernel: Kernel, watch: Stopwatch, device: EmulatedDevice | None) -> TimedKernel:
    """The kernel, timed; on a device, it can take the device's time."""
    return TimedKernel(DeviceKernel(kernel, device) if device else kernel, watch)


class Ours:
    """A strategy of this project. For `order`, `positions` and `attend` see `peers`."""

    order = "sbhd"

    def __init__(
        self, case: Case, problem: Workload, group: dist.ProcessGroup, kernel: TimedKernel, costs: Costs
    ) -> None:
        self.cp, self.kernel = ContextParallel(case.choice, group=group), kernel
        self.case, self.problem, self.costs = case, problem, costs
        self.documents: dict[int, Documents | None] = {}  # by the length of the sequence

    def documents_of(self, length: int) -> Documents | None:
        """The documents of the sequence or of its beginning, placed if the case says so."""
        if length not in self.documents:
            found = documents_of(self.problem, length)
            if found and self.case.placed:
                found = found.placed(place(found, self.cp.n // self.cp.head_parallel_size, self.costs))
            self.documents[length] = found
        return self.documents[length]

    def positions(self, length: int) -> Tensor:
        return self.cp.positions(length, self.documents_of(length))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = self.documents_of(len(q) * self.cp.n)
        return context_parallel_attention(
            q, k, v, self.cp, causal=self.problem.causal, documents=documents, kernel=self.kernel
        )

    def planned_bytes(self) -> int:
        """What this rank receives in both passes: the rows that the mask needs, of the chunks that the plans send."""
        problem, plans = self.problem, self.cp.plans
        lengths = problem.length, problem.length
        mask = Mask(problem.causal, documents=self.documents_of(problem.length))
        blocks = plans.blocks(mask, lengths, self.kernel)
        rows = problem.length // problem.ranks * problem.batch
        shape = Shape(rows, problem.heads, problem.kv_heads, problem.head_dim, DTYPES[problem.dtype].itemsize)
        total = 0
        for backward in (False, True):
            plan = plans.of(mask, lengths, problem.heads, problem.kv_heads, backward=backward)
            total += received_bytes(plan, self.cp.rank, shape, plans.row_sets(plan, blocks))
        return total


def documents_of(problem: Workload, length: int) -> Documents | None:
    """The documents of the first `length` tokens; None if the sequence is one document."""
    if problem.documents is None:
        return None
    bounds = torch.tensor([0, *problem.documents]).cumsum(0).clamp(max=length).unique()
    return Documents.packed(bounds, length)


def build(case: Case, problem: Workload, group: dist.ProcessGroup, kernels: Kernels, costs: Costs) -> object:
    """The strategy or peer on the ranks of `group`. An exception says why it cannot run.

    Documents are placed for `costs`.
    """
    if not case.peer:
        return Ours(case, problem, group, kernels.ours, costs)
    if problem.documents:
        raise ValueError("it has no packed documents")
    adapter = importlib.import_module(f"{__package__}.peers.{PEERS[case.name][0]}")
    return adapter.Adapter(problem, group, kernels.peers, **case.options)


def step(subject: object, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Output and gradients of one forward and backward pass, in the subject's order of dimensions."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = subject.attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def whole_tensors(problem: Workload, length: int) -> list[Tensor]:
    """q, k, v and output gradient [length, batch, heads, head_dim], the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(length, problem.batch, h, problem.head_dim) for h in heads]
    return [torch.randn(shape, generator=generator).to(DTYPES[problem.dtype]) for shape in shapes]


def local_tensors(subject: object, whole: list[Tensor]) -> list[Tensor]:
    """This rank's tokens of whole tensors, contiguous in the subject's order of dimensions."""
    rows = subject.positions(len(whole[0]))
    return [_ordered(subject, x[rows]).contiguous() for x in whole]


def _ordered(subject: object, x: Tensor) -> Tensor:
    return x if subject.order == "sbhd" else x.transpose(0, 1)


class ExactAttention:
    """Output and gradients by definition, in float64, of a sequence short enough for that."""

    def __init__(self, problem: Workload) -> None:
        self.problem = problem
        self.whole = whole_tensors(problem, min(problem.length, 16 * problem.ranks))
        *leaves, dout = (x.double() for x in self.whole)
        leaves = [x.requires_grad_() for x in leaves]
        length = len(self.whole[0])
        documents = documents_of(problem, length)
        seen = None
        if documents:
            starts, _ = documents.around(torch.arange(length))
            seen = starts.unsqueeze(2) == starts.unsqueeze(1)
        out, _ = attention(*leaves, causal=problem.causal, scale=1 / math.sqrt(problem.head_dim), seen=seen)
        self.expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def error_of(self, subject: object) -> float:
        """The largest relative error of this rank's part of output, dq, dk and dv.

        Raises:
            ValueError: it is larger than rounding explains, or not a number.
        """
        got = step(subject, *local_tensors(subject, self.whole))
        errors = {}
        for name, x, exact in zip(("output", "dq", "dk", "dv"), got, self.expected, strict=True):
            exact = exact[subject.positions(len(exact))]
            errors[name] = ((_ordered(subject, x).double() - exact).norm() / exact.norm()).item()
        name, worst = max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
        if not worst <= TOLERANCE[self.problem.dtype]:
            raise ValueError(f"not exact: relative error of {name} {worst:.1e}")
        return worst
