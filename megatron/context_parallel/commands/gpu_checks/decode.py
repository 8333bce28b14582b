"""The paged kernel of decode steps: against float64, in a CUDA graph, and how fast it reads keys."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.kernels.paged import PagedKernel, Seen, refusal
from megatron.context_parallel.kernels.quantized import FORMATS, pack, unpack

from .common import CheckReport, CheckSizes, row_of
from .speed import GpuClock

TABLE = "decode"
PAGE = 64
KV_HEADS, GROUP = 2, 4
BOUND = 2e-5  # of float32 sums of products of 16-bit numbers; weights are rounded to 16 bits
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


class PagedRows(NamedTuple):
    """Query rows, a cache, and what each row sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Seen

    @classmethod
    def random(cls, lengths: list[int], dim: int, dtype: torch.dtype, device: torch.device) -> "PagedRows":
        """Rows that see so many keys each, in pages in a random order."""
        torch.manual_seed(dim)
        width = -(-max(lengths) // PAGE)
        pages = width * len(lengths)
        q = torch.randn(len(lengths), KV_HEADS * GROUP, dim, device=device).to(dtype)
        k, v = (torch.randn(pages * PAGE, KV_HEADS, dim, device=device).to(dtype) for _ in range(2))
        table = torch.randperm(pages).int().view(len(lengths), width).to(device)
        end = torch.tensor(lengths, dtype=torch.int32).to(device)
        return cls(q, k, v, Seen(table, end // 3, end, PAGE))


def check_decode(report: CheckReport, sizes: CheckSizes, device: torch.device, clock: GpuClock) -> None:
    """Errors of rows over pages, the same in a CUDA graph, and GB/s of keys, for head_dims, dtypes and formats."""
    if device.type != "cuda":
        report.add(TABLE, left_out="needs a GPU")
        return
    cases: list[tuple[int, torch.dtype, str | None]] = [(dim, torch.bfloat16, None) for dim in sizes.head_dims]
    for dim in sizes.speed_head_dims:
        cases += [(dim, torch.float16, None), *((dim, torch.bfloat16, form) for form in FORMATS)]
    for dim, dtype, form in cases:
        case = {"head_dim": dim, "dtype": str(dtype), "format": form or "auto"}
        if why := refusal(device, dtype, dim, dim, form):
            report.add(TABLE, **case, left_out=why)
            continue
        with row_of(report, TABLE, **case) as row:
            row |= _check(sizes, dim, dtype, form, clock, device)


def _check(
    sizes: CheckSizes, dim: int, dtype: torch.dtype, form: str | None, clock: GpuClock, device: torch.device
) -> dict:
    """The errors of a case, without and with a graph, and the rate."""
    few = PagedRows.random([0, 1, 333, sizes.decode_tokens // 8], dim, dtype, device)
    keys, values = (pack(x, form) if form else x for x in few[1:3])
    if form:
        few = few._replace(k=unpack(keys, form, dtype), v=unpack(values, form, dtype))
    out = torch.zeros(*few.q.shape[:2], dim + 1, device=device)
    kernel = PagedKernel(len(few.q), KV_HEADS * GROUP, KV_HEADS, dim, likely=2, device=device)

    def call() -> None:
        kernel.forward(few.q, keys, values, few.seen, dim**-0.5, out[..., :-1], out[..., -1], form)

    call()
    error = _error(few, out)
    replay = capture(call)
    few.seen.end[2] -= 100  # a graph reads the tables of each step
    replay()
    again = _error(few, out)
    bound = BOUND + ROUNDING[dtype]
    verdict = "PASS" if error < bound and again < bound else "FAIL"
    rate = _rate(sizes, dim, dtype, form, clock, device)
    return {"error": error, "error of a graph": again, "bound": bound, "verdict": verdict, "GB/s": rate}


def _error(rows: PagedRows, found: Tensor) -> float:
    """The largest error of the outputs and log-sum-exps [rows, heads, dv + 1]."""
    errors = []
    for row, (first, end) in enumerate(zip(rows.seen.first.tolist(), rows.seen.end.tolist(), strict=True)):
        if first == end:
            nothing = torch.zeros_like(found[row])
            nothing[:, -1] = -torch.inf
            errors.append(0.0 if torch.equal(found[row], nothing) else torch.inf)
            continue
        at = torch.arange(first, end, device=found.device)
        slots = rows.seen.table[row].long()[at // PAGE] * PAGE + at % PAGE
        keys, values = (x[slots].double().repeat_interleave(GROUP, 1) for x in (rows.k, rows.v))
        scores = (keys * rows.q[row].double()).sum(-1) * rows.q.shape[-1] ** -0.5
        out = (scores.softmax(0).unsqueeze(-1) * values).sum(0)
        expected = torch.cat([out, scores.logsumexp(0).unsqueeze(-1)], -1)
        errors.append(float((found[row] - expected).abs().max()))
    return max(errors)


def capture(call: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of a call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _rate(
    sizes: CheckSizes, dim: int, dtype: torch.dtype, form: str | None, clock: GpuClock, device: torch.device
) -> float:
    """GB/s at which the keys and values of some long rows are read."""
    rows = PagedRows.random([sizes.decode_tokens] * sizes.decode_rows, dim, dtype, device)
    rows.seen.first.zero_()
    keys, values = (pack(x, form) if form else x for x in rows[1:3])
    out = torch.zeros(*rows.q.shape[:2], dim + 1, device=device)
    kernel = PagedKernel(len(rows.q), KV_HEADS * GROUP, KV_HEADS, dim, likely=len(rows.q), device=device)
    times = []
    for _ in range(sizes.repeats + 1):
        clock.let_host_ahead()
        start = clock.mark()
        kernel.forward(rows.q, keys, values, rows.seen, dim**-0.5, out[..., :-1], out[..., -1], form)
        times.append(clock.between(start, clock.mark()))
    read = sizes.decode_rows * sizes.decode_tokens * sum(x[0].numel() * x.itemsize for x in (keys, values))
    return read / min(times[1:]) / 1e9
