"""Compares blocks of every backend, and every strategy with all ranks in this process, with float64."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel import STRATEGIES, AllRanks, UsageError, context_parallel_attention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import BlockGrad, Kernel, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, PieceMask, Runs
from megatron.context_parallel.kernels.reference import Reference, attention
from megatron.context_parallel.tokens.mask import Documents, Mask

from .common import STEP, CheckReport, CheckSizes, RandomBlock, kernels

WHAT = ("out", "lse", "dq", "dk", "dv")
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}  # relative error of a whole tensor
LSE_BOUND = 1e-4


def run_masks(rows: int, device: torch.device) -> dict[str, tuple[Runs, int]]:
    """Masks that are neither full nor causal, and their key rows."""
    up = torch.arange(1, rows + 1)
    starts = torch.tensor([0, 1, rows // 3, rows // 3 + 1, rows // 2, rows - 3])  # documents: one token, odd, the rest
    document = starts[torch.searchsorted(starts, up, side="left") - 1]
    window = (up - rows // 5).clamp_min(0)
    half = up.clamp_max(rows // 2)
    found = {
        "step": ([0 * up], [STEP * up], STEP * rows),
        "window": ([window], [up], rows),
        "documents": ([document], [up], rows),
        "2 samples": ([document, window], [up, up], rows),
        "blind rows": ([torch.where(up <= rows // 2, window, half)], [half], rows),
    }
    masks = {}
    for name, (first, end, keys) in found.items():
        masks[name] = Runs(torch.stack(first).int().to(device), torch.stack(end).int().to(device)), keys
    return masks


def compare(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """Relative error of each tensor; infinite if only one of the two has infinities or NaN."""
    errors = []
    for a, b in zip(got, expected, strict=True):
        finite = b.isfinite()
        same = torch.equal(a.isfinite(), finite) and torch.equal(a[~finite].double(), b[~finite])
        difference = (a[finite].double() - b[finite]).norm() / b[finite].norm().clamp_min(1e-30)
        errors.append(difference.item() if same else math.inf)
    return errors


def add_errors(report: CheckReport, table: str, errors: list[float], dtype: torch.dtype, **row: object) -> None:
    bounds = [LSE_BOUND if what == "lse" else BOUNDS[dtype] for what in WHAT]
    good = all(e <= bound for e, bound in zip(errors, bounds, strict=True))
    name = str(dtype).removeprefix("torch.")
    report.add(table, **row, dtype=name, **dict(zip(WHAT, errors, strict=True)), verdict="PASS" if good else "FAIL")


def check_blocks(report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device) -> None:
    """Compares every backend and supported mask with attention by definition in float64."""
    masks: dict[str, tuple[PieceMask, int]] = {
        "full": (FULL, sizes.block_rows + 40),
        "causal": (CAUSAL, sizes.block_rows),
    }
    irregular = run_masks(sizes.block_rows, device)
    for dtype in BOUNDS:
        for dim in sizes.head_dims if dtype is torch.bfloat16 else sizes.head_dims[:1]:
            few = names if dim in sizes.speed_head_dims else ["triton"]  # libraries are tested by their authors
            for name, kernel in kernels(few, device, dtype, dim):
                for what, (mask, keys) in (masks | (irregular if name == "triton" else {})).items():
                    for heads, group in ((4, 1), (2, 8)):
                        block = RandomBlock.random(sizes.block_rows, keys, heads, group, dim, dtype, device)
                        errors = block_errors(kernel, block, mask)
                        row = {"backend": name, "mask": what, "head_dim": dim, "heads": f"{heads * group}:{heads}"}
                        add_errors(report, "blocks against float64", errors, dtype, **row)
                if dtype is torch.bfloat16 and dim in sizes.speed_head_dims:
                    block = RandomBlock.random(sizes.odd_rows, sizes.odd_rows, 2, 8, dim, dtype, device)
                    row = {"backend": name, "mask": "causal, odd rows", "head_dim": dim, "heads": "16:2"}
                    add_errors(report, "blocks against float64", block_errors(kernel, block, CAUSAL), dtype, **row)


def block_errors(kernel: Kernel, block: RandomBlock, mask: PieceMask) -> list[float]:
    q, k, v, dout = block
    scores, reference = Scores(q.shape[-1] ** -0.5), Reference()
    out, lse = reference.forward(q, k, v, mask, scores)
    delta = (dout.double() * out).sum(-1)
    expected = out, lse, *reference.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores)
    grad = BlockGrad(dout, q, k, v, lse.float(), delta.float(), mask)
    return compare((*kernel.forward(q, k, v, mask, scores), *kernel.backward(grad, scores)), expected)


def check_strategies(report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device) -> None:
    """Every strategy, with all ranks in this process and the default backend; attention2d's step masks with each."""
    dim, dtype = 64, torch.bfloat16
    auto = kernel_for(device, dtype, dim)
    for n in sizes.ranks:
        length = n * sizes.rows_per_rank
        torch.manual_seed(n)
        q, k, v, dout = (torch.randn(length, 2, h, dim, device=device).to(dtype) for h in (8, 4, 4, 8))
        ids = torch.bucketize(torch.arange(length), torch.tensor([1, length // 3, length // 2 + 1]), right=True)
        masks: dict[str, dict[str, Any]] = {
            "causal": {},
            "full": {"causal": False},
            "window": {"window": (length // 3, 0)},
            "documents": {"documents": Documents(ids)},
        }
        for what, mask in masks.items():
            expected = exact(q, k, v, dout, **mask)
            for name, kernel in [("auto", auto), *kernels(names, device, dtype, dim)]:
                for strategy in STRATEGIES if name == "auto" else ["attention2d"]:
                    options: dict[str, Any] = {"head_parallel_size": 2} if strategy in ("usp", "loongtrain") else {}
                    try:
                        cp = AllRanks(n, strategy, **options)
                        got = distributed(cp, kernel, q, k, v, dout, **mask)
                    except UsageError:
                        continue  # the strategy does not support the rank count, or the backend the mask
                    row = {"strategy": strategy, "layout": cp.layout, "ranks": n, "mask": what, "backend": name}
                    add_errors(report, "strategies against float64", compare(got, expected), dtype, **row)


def with_gradients(function: Callable, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def distributed(cp: AllRanks, kernel: Kernel, q, k, v, dout, **mask) -> tuple[Tensor, ...]:
    def run(q, k, v):
        return context_parallel_attention(q, k, v, cp, return_lse=True, kernel=kernel, **mask)

    return with_gradients(run, q, k, v, dout)


def exact(q, k, v, dout, *, causal=True, window=(-1, -1), documents=None) -> tuple[Tensor, ...]:
    starts, ends = Mask(causal, window, documents).seen(torch.arange(len(q)))
    at = torch.arange(len(q))
    seen = ((at >= starts.unsqueeze(2)) & (at < ends.unsqueeze(2))).to(q.device)
    wide = [x.double() for x in (q, k, v, dout)]
    return with_gradients(lambda *x: attention(*x, causal=False, scale=q.shape[-1] ** -0.5, seen=seen), *wide)
