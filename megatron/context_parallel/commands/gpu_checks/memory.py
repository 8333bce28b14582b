"""The peak memory of one rank's share of an attention, without the other ranks."""

from collections.abc import Callable
from typing import Protocol

import torch

from megatron.context_parallel import AllRanks, context_parallel_attention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.liveness import peak
from megatron.context_parallel.runtime.comm.transport import Program, run_rank
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.placement import Placement

from .common import CheckReport, CheckSizes, row_of

CASES = ("ring", "attention2d", "mesh")
KERNEL = 4  # temporary float32 units of a kernel and its caller: results, and those of a gathered block


class PeakMemory(Protocol):
    """The peak allocated bytes since `start`."""

    def start(self) -> None: ...

    def peak(self) -> int: ...


class GpuMeter:
    """The peak of PyTorch's allocator on the current GPU."""

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before


class _Done:
    def wait(self) -> None:
        pass


class SilentTransport:
    """A transport that sends nothing: receive buffers keep their contents."""

    can_reduce = False

    def world_rank(self, peer: int) -> int:
        return peer

    def _nothing(self, *_: object) -> _Done:
        return _Done()

    exchange = all_to_all = all_gather = reduce_scatter = _nothing


class OneRank(AllRanks):
    """Rank 0 of n. Its results are meaningless."""

    def length(self, x: torch.Tensor) -> int:
        return len(x) * self.n

    def split(self, x: torch.Tensor, placement: Placement | None) -> list[torch.Tensor]:
        return [x]

    def join(self, parts: list[torch.Tensor], placement: Placement | None) -> torch.Tensor:
        return parts[0]

    def run(self, program: Callable[..., Program], plan: Plan, problem, parts: list[tuple]) -> list:
        return [run_rank(program(plan, problem, 0, SilentTransport(), *parts[0]))]


def formula(cp: OneRank, rows: int, heads: int, kv_heads: int, dim: int) -> float:
    """The maximum bytes: the peak units of the plans, and those of a kernel, all as float32."""
    plans = [cp.plans.of(Mask(), (rows * cp.n,) * 2, heads, kv_heads, backward=backward) for backward in (False, True)]
    units = max(peak(plan, 0, kv_heads / heads) for plan in plans)
    return (units + KERNEL) * rows * heads * dim * 4


def measure_memory(report: CheckReport, sizes: CheckSizes, device: torch.device, meter: PeakMemory) -> None:
    """Peak bytes of rank 0 of 8, forward and backward, over the formula."""
    dim, (heads, kv_heads) = sizes.speed_head_dims[-1], sizes.overhead_heads
    kernel = kernel_for(device, torch.bfloat16, dim)
    for strategy in CASES:
        for rows in sizes.memory_rows:
            cp = OneRank(8, strategy)
            q, k, v, dout = (
                torch.zeros(rows, 1, h, dim, device=device, dtype=torch.bfloat16)
                for h in (heads, kv_heads, kv_heads, heads)
            )
            for x in (q, k, v):
                x.requires_grad_()
            limit = formula(cp, rows, heads, kv_heads, dim)
            case = {"strategy": strategy, "ranks": 8, "rows": rows, "heads": f"{heads}:{kv_heads}", "head_dim": dim}
            with row_of(report, "memory", **case, formula_GB=limit / 1e9) as row:
                for _ in range(2):  # the first compiles
                    meter.start()
                    torch.autograd.grad(context_parallel_attention(q, k, v, cp, kernel=kernel), (q, k, v), dout)
                    measured = meter.peak()
                row |= {"GB": measured / 1e9, "share": measured / limit}
