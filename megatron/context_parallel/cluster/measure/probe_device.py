"""Measures what a rank computes with: attention blocks, products of matrices, memory, launches."""

import os
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from megatron.context_parallel.attention.context import AllRanks
from megatron.context_parallel.cluster.description import BACKWARD, AttentionRate, Device, GemmRate
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL
from megatron.context_parallel.progress import tracked

from .meter import Meter

SHORT = 16  # rows of a block that costs its launch
LONG = 4  # keys for each query of a long block, as where keys are gathered
FEWEST, MOST = 128, 16384  # rows of blocks
LEAST = 0.06  # seconds: a quarter of what all calls of a block may take
COLD = 2**26  # bytes that are used in turn: more than the caches of a processor keep
SETS = range(4, 65)  # of inputs of a block
CHUNKS = 4, 8  # of the small ring that costs its steps
SIZES = {"cpu": (256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192, 16384)}  # of products
COLD_ON_GPU = 2**28  # bytes of products that are used in turn: more than the caches of a GPU keep
FP8 = torch.float8_e4m3fn
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", FP8: "fp8"}


class BlockTimer:
    """Blocks of attention of one rank."""

    def __init__(self, meter: Meter, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
        self.meter, self.dtype, self.heads, self.kv_heads, self.head_dim = meter, dtype, heads, kv_heads, head_dim
        self.kernel = kernel_for(meter.device, dtype, head_dim)
        self.scores = Scores(head_dim**-0.5)

    def seconds(self, rows: int, mask: str, kv_heads: int, keys: int | None = None) -> tuple[float, float]:
        """Of a forward and a backward pass, each time with other inputs: in training too they are new to the caches."""
        first = self._inputs(rows, kv_heads, keys)
        count = _sets_in_turn(sum(x.nbytes for x in first), COLD)
        sets = [first]
        while len(sets) < count:
            sets.append([x.clone() for x in first])
        q, k, v, _ = first
        lse = self.kernel.forward(q, k, v, mask, self.scores)[1].to(torch.promote_types(self.dtype, torch.float32))
        delta = torch.zeros_like(lse)  # the values of both do not change the time
        grads = [BlockGrad(dout, q, k, v, lse, delta, mask) for q, k, v, dout in sets]
        inputs, blocks = cycle(sets), cycle(grads)
        return (
            self.meter.computing(lambda: self._forward(next(inputs), mask)),
            self.meter.computing(lambda: self.kernel.backward(next(blocks), self.scores)),
        )

    def _forward(self, inputs: list[Tensor], mask: str) -> None:
        q, k, v, _ = inputs
        self.kernel.forward(q, k, v, mask, self.scores)

    def one(self) -> None:
        """A small one, forward."""
        self._forward(self._inputs(FEWEST, self.kv_heads), FULL)

    def _inputs(self, rows: int, kv_heads: int, keys: int | None = None) -> list[Tensor]:
        """Queries, keys, values and the gradient of the output."""
        groups = self.heads // self.kv_heads
        device = self.meter.device
        queries, key = (rows, kv_heads, groups, self.head_dim), (keys or rows, kv_heads, self.head_dim)
        return [torch.randn(shape, device=device).to(self.dtype) for shape in (queries, key, key, queries)]

    def rates(self, launch: float) -> tuple[AttentionRate, ...]:
        """Of growing blocks. Where they take long, of fewer heads, and at last of none."""
        found = list[AttentionRate]()
        turns = self.meter.n / self.meter.processors if self.meter.shared else 1
        for mask, long in tracked(((FULL, 1), (FULL, LONG), (CAUSAL, 1)), "measuring kinds of attention blocks"):
            rows = FEWEST
            kv_heads = self.kv_heads
            while rows * long <= MOST:
                keys = rows * long if long > 1 else None
                forward, backward = self.meter.everyone(self.seconds(rows, mask, kv_heads, keys))[0]
                times = [max(t - launch, t / 10) for t in (forward, backward)]
                found.append(self._rate(rows, keys, mask, kv_heads, *times))
                larger = 4 * (forward + backward) * turns  # the next size
                while larger > self.meter.target and kv_heads > 1:
                    kv_heads, larger = kv_heads // 2, larger / 2
                if larger > 4 * max(self.meter.target, LEAST):
                    break
                rows *= 2
        return tuple(found)

    def _rate(
        self, rows: int, keys: int | None, mask: str, kv_heads: int, forward: float, backward: float
    ) -> AttentionRate:
        heads = self.heads // self.kv_heads * kv_heads
        operations = 4 * heads * self.head_dim * rows * (keys or rows) / (2 if mask == CAUSAL else 1) / 1e12
        return AttentionRate(
            rows=rows,
            keys=keys,
            mask=mask,
            dtype=NAMES[self.dtype],
            head_dim=self.head_dim,
            forward_TFLOP_s=_digits(operations / forward),
            backward_TFLOP_s=_digits(operations * BACKWARD / backward),
        )


def measured_device(meter: Meter, blocks: BlockTimer) -> Device:
    """The device of each rank, while all compute."""
    dtype = blocks.dtype
    short = meter.everyone(blocks.seconds(SHORT, FULL, blocks.kv_heads))[0]
    launch = min(short)
    computed = sum(short) / 2  # seconds
    step, whole = _host(meter, blocks)
    gemm = _gemms(meter, dtype)
    in_fp8 = _gemms(meter, FP8) if _has_fp8(meter.device) else ()
    return Device(
        name=torch.cuda.get_device_name(meter.device) if meter.device.type == "cuda" else _processor(),
        peak_TFLOP_s=max(rate.TFLOP_s for rate in gemm),
        peak_fp8_TFLOP_s=max((rate.TFLOP_s for rate in in_fp8), default=None),
        memory_GiB=_digits(_memory(meter) / 2**30),
        memory_GB_s=_digits(_bandwidth(meter) / 1e9),
        attention=blocks.rates(launch),
        block_us=_digits(launch * 1e6),
        gemm=gemm + in_fp8,
        kernel_us=_digits(_kernel(meter) * 1e6),
        step_us=_digits(max(0.0, step - computed) * 1e6),
        pass_us=_digits(max(0.0, whole - computed) * 1e6),
    )


def _gemms(meter: Meter, dtype: torch.dtype) -> tuple[GemmRate, ...]:
    """Rates of products of square matrices of growing size."""
    rates = []
    for size in SIZES[meter.device.type]:
        seconds = meter.queued(_product(meter.device, dtype, size))
        rates.append(GemmRate(size=size, dtype=NAMES[dtype], TFLOP_s=_digits(2 * size**3 / seconds / 1e12)))
        if meter.everyone(seconds)[0] > meter.target:
            break
    return tuple(rates)


def _product(device: torch.device, dtype: torch.dtype, size: int) -> Callable[[], object]:
    """A product of square matrices: on a GPU with other ones each time, as in training. FP8 has a scale per tensor."""
    count = _sets_in_turn(2 * size**2 * dtype.itemsize, COLD_ON_GPU) if device.type == "cuda" else 1
    sets = []
    for _ in range(count):
        sets.append([torch.randn(size, size, device=device).to(dtype) for _ in range(2)])
    pairs = cycle(sets)
    if dtype is not FP8:
        return lambda: torch.matmul(*next(pairs))
    one, whole = torch.ones((), device=device), ScalingType.TensorWise

    def scaled() -> Tensor:
        a, b = next(pairs)
        return scaled_mm(a, b.T, one, whole, one, whole, output_dtype=torch.bfloat16, use_fast_accum=True)

    return scaled


def _sets_in_turn(size: int, cold: int) -> int:
    """How many sets of so many bytes are used in turn, so that each comes from memory."""
    return max(SETS[0], min(SETS[-1], cold // size))


def _has_fp8(device: torch.device) -> bool:
    """Whether it computes products in FP8: from compute capability 8.9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _bandwidth(meter: Meter) -> float:
    """Bytes a second of an addition in place to a partial that is not in the caches: it was used long ago."""
    numbers, pairs = (2**19, COLD // 2**22) if meter.device.type == "cpu" else (2**26, 1)
    ones = partial(torch.ones, numbers, device=meter.device)
    partials = cycle([(ones(), ones()) for _ in range(pairs)])

    def add() -> None:
        total, part = next(partials)
        total.add_(part)

    return 3 * 4 * numbers / meter.computing(add)


def _kernel(meter: Meter) -> float:
    """Seconds of a small operation."""
    a = torch.ones(SHORT, device=meter.device)

    def many() -> None:
        for _ in range(100):
            a.add_(1)

    return meter.computing(many) / 100


def _host(meter: Meter, blocks: BlockTimer) -> tuple[float, float]:
    """Seconds of a step of a plan, and of a pass of one step, each with a small block: forward and backward, halved.

    Messages stay inside this process.
    """
    from megatron.context_parallel.attention.api import context_parallel_attention

    def call(n: int) -> float:
        cp = AllRanks(n, "ring")
        shape = n * SHORT, 1, blocks.kv_heads, blocks.head_dim
        q, k, v = (torch.randn(shape, device=meter.device).to(blocks.dtype).requires_grad_() for _ in range(3))

        def passes() -> None:
            out = context_parallel_attention(q, k, v, cp, causal=False)
            torch.autograd.grad(out, (q, k, v), q)

        return meter.computing(passes) / (2 * n)

    few, many = CHUNKS
    return (call(many) - call(few)) / (many - few), call(1)


def _memory(meter: Meter) -> float:
    """Bytes that a rank has."""
    if meter.device.type == "cuda":
        return torch.cuda.get_device_properties(meter.device).total_memory
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "CPU"


def _digits(x: float) -> float:
    return float(f"{x:.4g}")
