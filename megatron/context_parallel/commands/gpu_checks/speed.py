"""TFLOP/s of the backends, and the overhead of the executor."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron.context_parallel import AllRanks, context_parallel_attention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import BlockGrad, Kernel, Scores
from megatron.context_parallel.kernels.masks import KeyRanges, Piece, PieceMask, cut
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.patches.torch_gpu_sleep import let_host_ahead
from megatron.context_parallel.tokens.mask import Mask

from .common import (
    STEP,
    CheckReport,
    CheckSizes,
    RandomBlock,
    deterministic_mode,
    kernels,
    row_of,
    said,
    synchronisations,
)

REPEATS = 5


class GpuClock:
    """Times on the GPU's own clock; recording one does not wait for earlier work."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def let_host_ahead(self) -> None:
        let_host_ahead()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


def measure_speed(
    report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device, clock: GpuClock
) -> None:
    """Median TFLOP/s of each backend for masks with equal numbers of pairs, interleaved."""
    for dim in reversed(sizes.speed_head_dims):
        for length in sizes.lengths:
            for heads, group in sizes.heads:
                for mask in ("full", "causal", "step"):
                    rows, keys = (length // 2, length // 2 * STEP) if mask == "step" else (length, length)
                    block = RandomBlock.random(rows, keys, heads, group, dim, torch.bfloat16, device)
                    calls, wrong = callable_ways(kernels(names, device, torch.bfloat16, dim), block, mask)
                    times = medians(calls, sizes.repeats, clock)
                    pairs = rows * keys if mask == "full" else keys // rows * rows * (rows + 1) // 2
                    flops = {"forward": 4 * pairs * heads * group * dim, "backward": 10 * pairs * heads * group * dim}
                    row = {"head_dim": dim, "heads": f"{heads * group}:{heads}", "length": length, "mask": mask}
                    for name, error in wrong.items():
                        speed = {way: None if error else flops[way] / times[name, way] / 1e12 for way in flops}
                        report.add("TFLOP/s, bfloat16", **row, backend=name, **speed, wrong=error)


def callable_ways(
    found: Iterable[tuple[str, Kernel]], block: RandomBlock, mask: str
) -> tuple[dict[tuple[str, str], Callable[[], None]], dict[str, str]]:
    """The calls of the backends by name and way, each called once; and what went wrong with each backend, or ""."""
    calls, wrong = dict[tuple[str, str], Callable[[], None]](), dict[str, str]()
    for name, kernel in found:
        try:
            of_kernel = ways(kernel, name, block, mask)
            for call in of_kernel.values():
                call()
        except Exception as error:  # of a library, or of Triton's compiler: the others are measured all the same
            wrong[name] = said(error)
            continue
        wrong[name] = ""
        calls |= {(name, way): call for way, call in of_kernel.items()}
    return calls, wrong


def ways(kernel: Kernel, name: str, block: RandomBlock, mask: str) -> dict[str, Callable[[], None]]:
    """Forward and backward of a block; a step mask is cut into pieces if the backend does not support it."""
    q, k, v, dout = block
    pieces = [Piece(slice(None), slice(None), mask)]
    if mask == "step":
        rows = torch.arange(1, len(q) + 1, dtype=torch.int32).unsqueeze(0)
        step = KeyRanges(torch.zeros_like(rows), STEP * rows)
        one = Piece(slice(None), slice(None), KeyRanges(*(x.to(q.device) for x in step)))
        pieces = [one] if name == "triton" else cut(step)
    scores = Scores(q.shape[-1] ** -0.5)
    stats = torch.full(q.shape[:3], math.log(len(k)), device=q.device), torch.zeros(q.shape[:3], device=q.device)

    def forward() -> None:
        parts = [(at, kernel.forward(q[at], k[kv], v[kv], mask, scores)) for at, kv, mask, *_ in pieces]
        if len(parts) > 1:
            out, lse = torch.zeros_like(q, dtype=torch.float32), torch.full_like(stats[0], -math.inf)
            for at, part in parts:
                merge(out[at], lse[at], *part)

    def backward() -> None:
        lse, delta = stats
        for at, kv, mask, *_ in pieces:
            kernel.backward(BlockGrad(dout[at], q[at], k[kv], v[kv], lse[at], delta[at], mask), scores)

    return {"forward": forward, "backward": backward}


def medians(calls: dict, repeats: int, clock: GpuClock) -> dict:
    times = defaultdict(list)
    for turn in range(repeats + 1):
        for name, call in calls.items():
            clock.let_host_ahead()
            start = clock.mark()
            call()
            took = clock.between(start, clock.mark())
            if turn:  # the first compiles and warms up
                times[name].append(took)
    return {name: statistics.median(taken) for name, taken in times.items()}


def ratios(rows: list[dict], way: str) -> list[float]:
    """The ratio of the position kernel's step TFLOP/s to the best library's causal TFLOP/s, for each shape."""
    shapes: dict[tuple, dict] = defaultdict(dict)
    for row in rows:
        if row["wrong"]:
            continue
        shapes[row["head_dim"], row["heads"], row["length"]][row["backend"], row["mask"]] = row[way]
    found = []
    for of_shape in shapes.values():
        libraries = [speed for (name, mask), speed in of_shape.items() if name != "triton" and mask == "causal"]
        best = max(libraries, default=None)
        if best and ("triton", "step") in of_shape:
            found.append(of_shape["triton", "step"] / best)
    return found


class CountingKernel:
    """A kernel whose calls are counted and timed."""

    def __init__(self, kernel: Kernel, clock: GpuClock) -> None:
        self.kernel, self.clock = kernel, clock
        self.calls: list[tuple] = []

    def pieces(self, block: KeyRanges, keys: int) -> list:
        return self.kernel.pieces(block, keys)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        return self._watch(self.kernel.forward, q, k, v, mask, scores)

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        return self._watch(self.kernel.backward, grad, scores)

    def _watch(self, call: Callable, *args: object) -> tuple:
        start = self.clock.mark()
        result = call(*args)
        self.calls.append((start, self.clock.mark()))
        return result


def measure_overhead(
    report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device, clock: GpuClock
) -> None:
    """The overhead of the executor over its kernels, forward and backward of four ranks in turn."""
    n, dim, (heads, kv_heads) = 4, 128, sizes.overhead_heads
    torch.manual_seed(0)
    length = n * sizes.overhead_rows_per_rank
    shapes = [(length, 1, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes)
    for x in (q, k, v):
        x.requires_grad_()
    ours = [name for name in names if name == "triton"]
    for name, kernel in [("auto", kernel_for(device, q.dtype, dim)), *kernels(ours, device, q.dtype, dim)]:
        for strategy, layout in (("ring", None), ("attention2d", "cyclic")):
            cp, shares, watched = AllRanks(n, strategy, layout), [], CountingKernel(kernel, clock)
            case = {"strategy": strategy, "layout": cp.layout, "ranks": n, "backend": name}
            case |= {"rows per rank": sizes.overhead_rows_per_rank, "heads": f"{heads}:{kv_heads}"}
            with row_of(report, "executor", **case) as row:
                for turn in range(sizes.repeats + 1):
                    watched.calls.clear()
                    start = clock.mark()
                    out = context_parallel_attention(q, k, v, cp, kernel=watched)
                    torch.autograd.grad(out, (q, k, v), dout)
                    total = clock.between(start, clock.mark())
                    if turn:
                        shares.append(1 - sum(clock.between(*call) for call in watched.calls) / total)
                row["launches"], row["blocks"] = launches(cp, kernel, clock, q, k, v)
                row["overhead"] = statistics.median(shares)


def check_repeats(report: CheckReport, sizes: CheckSizes, device: torch.device) -> None:
    """Checks for bitwise equal results of five runs in deterministic mode, and no waits of the host after the first."""
    n, dim, (heads, kv_heads) = 4, sizes.speed_head_dims[-1], sizes.overhead_heads
    with deterministic_mode():
        kernel = kernel_for(device, torch.bfloat16, dim)
        for strategy in ("ring", "attention2d", "mesh"):
            torch.manual_seed(0)
            cp, shapes = AllRanks(n, strategy), [(12 * n * 32, 1, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
            q, k, v, dout = (torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes)
            results, waits = [], 0
            for x in (q, k, v):
                x.requires_grad_()
            with row_of(report, "repeats", strategy=strategy, repeats=REPEATS) as row:
                for turn in range(REPEATS):
                    with synchronisations(device) as counted:
                        out = context_parallel_attention(q, k, v, cp, kernel=kernel)
                        assert isinstance(out, Tensor)  # without the log-sum-exp
                        results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
                    waits += counted() if turn else 0
                pairs = [pair for again in results[1:] for pair in zip(results[0], again, strict=True)]
                row |= {"differ": sum(not torch.equal(a, b) for a, b in pairs), "synchronisations": waits}


def launches(cp: AllRanks, kernel: Kernel, clock: GpuClock, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Kernel calls of a causal forward pass, and the blocks (query chunks against gathered keys) of its plan."""
    watched = CountingKernel(kernel, clock)
    context_parallel_attention(q, k, v, cp, kernel=watched)
    plan = cp.plans.of(Mask(), (len(q), len(k)), q.shape[2], k.shape[2], backward=False)
    blocks = 0
    for steps in plan.steps:
        blocks += sum(len(attend.q_chunks) for step in steps for attend in step.attend)
    return len(watched.calls), blocks
