"""Compares blocks of every backend, and every strategy with all ranks in this process, with float64."""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel import STRATEGIES, AllRanks, UsageError, context_parallel_attention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import BlockGrad, Kernel, Scores
from megatron.context_parallel.kernels.libraries.base import Library
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, Piece, PieceMask
from megatron.context_parallel.kernels.reference import Reference, attention
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.mask import Mask

from .common import STEP, CheckReport, CheckSizes, RandomBlock, deterministic_mode, kernels, said

WHAT = ("out", "lse", "dq", "dk", "dv")
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}  # relative error of a whole tensor
LSE_BOUND = 1e-4
SOFTCAP = 5.0


def range_masks(rows: int, device: torch.device) -> dict[str, tuple[KeyRanges, int]]:
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
        masks[name] = KeyRanges(torch.stack(first).int().to(device), torch.stack(end).int().to(device)), keys
    return masks


def last_keys(block: RandomBlock) -> KeyRanges:
    """Each row sees the keys up to its own, as the last rows of a sequence do."""
    ends = torch.arange(len(block.k) - len(block.q) + 1, len(block.k) + 1, dtype=torch.int32, device=block.q.device)
    return KeyRanges(torch.zeros_like(ends)[None], ends[None])


def compare(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """Relative error of each tensor; infinite if only one of the two has infinities or NaN."""
    errors = []
    for a, b in zip(got, expected, strict=True):
        finite = b.isfinite()
        same = torch.equal(a.isfinite(), finite) and torch.equal(a[~finite].double(), b[~finite])
        difference = (a[finite].double() - b[finite]).norm() / b[finite].norm().clamp_min(1e-30)
        errors.append(difference.item() if same else math.inf)
    return errors


def add_errors(
    report: CheckReport, table: str, compute: Callable[[], list[float]], dtype: torch.dtype, **row: object
) -> None:
    """Adds a row with the errors. If they cannot be computed, they are infinite, and the row says why.

    Raises:
        UsageError: from `compute`: this case is not supported.
    """
    wrong = ""
    try:
        errors = compute()
    except UsageError:
        raise
    except Exception as error:  # of a library, or of Triton's compiler: the other rows are computed all the same
        errors, wrong = [math.inf] * len(WHAT), said(error)
    bounds = [LSE_BOUND if what == "lse" else BOUNDS[dtype] for what in WHAT]
    good = all(e <= bound for e, bound in zip(errors, bounds, strict=True))
    named = {"dtype": str(dtype).removeprefix("torch."), **dict(zip(WHAT, errors, strict=True))}
    report.add(table, **row, **named, verdict="PASS" if good else "FAIL", wrong=wrong)


def check_blocks(report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device) -> None:
    """Compares every backend and supported mask with attention by definition in float64."""
    masks: dict[str, tuple[PieceMask, int]] = {
        "full": (FULL, sizes.block_rows + 40),
        "full, whole tiles": (FULL, 2 * sizes.block_rows),
        "causal": (CAUSAL, sizes.block_rows),
    }
    irregular = range_masks(sizes.block_rows, device)
    for dtype in BOUNDS:
        for dim in sizes.head_dims if dtype is torch.bfloat16 else sizes.head_dims[:1]:
            few = names if dim in sizes.speed_head_dims else ["triton"]  # libraries are tested by their authors
            for name, kernel in kernels(few, device, dtype, dim):
                for what, (mask, keys) in (masks | (irregular if name == "triton" else {})).items():
                    for heads, group in ((4, 1), (2, 8)):
                        block = RandomBlock.random(sizes.block_rows, keys, heads, group, dim, dtype, device)
                        _add_block(report, name, kernel, what, block, mask)
                if dtype is torch.bfloat16 and dim in sizes.speed_head_dims:
                    block = RandomBlock.random(sizes.odd_rows, sizes.odd_rows, 2, 8, dim, dtype, device)
                    _add_block(report, name, kernel, "causal, odd rows", block, CAUSAL)


def check_other_blocks(report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device) -> None:
    """A softcap, values of another head_dim, and deterministic gradients."""
    dtype = torch.bfloat16
    rows = sizes.block_rows
    window = range_masks(rows, device)["window"][0]
    for dim in sizes.head_dims[:2]:
        block = RandomBlock.random(rows, rows, 2, 8, dim, dtype, device)
        for name, kernel in kernels(names, device, dtype, dim, softcap=SOFTCAP):
            _add_block(report, name, kernel, "causal, softcap", block, CAUSAL, SOFTCAP)
        with deterministic_mode():
            of_names = list(kernels(names, device, dtype, dim))
        for name, kernel in of_names:
            _add_block(report, name, kernel, "causal, deterministic", block, CAUSAL, deterministic=True)
            if name == "triton":
                _add_block(report, name, kernel, "window, deterministic", block, window, deterministic=True)
        for few in (1, 3, 15):  # as in decoding: programs share the keys
            block = RandomBlock.random(few, 8 * rows, 2, 8, dim, dtype, device)
            for name, kernel in kernels([name for name in names if name == "triton"], device, dtype, dim):
                _add_block(report, name, kernel, f"full, {few} rows", block, FULL)
                _add_block(report, name, kernel, f"last keys, {few} rows", block, last_keys(block))
    dim, value_dim = sizes.value_dims
    block = RandomBlock.random(rows, rows, 2, 8, dim, dtype, device, value_dim)
    for name, kernel in kernels(names, device, dtype, dim, value_dim=value_dim):
        _add_block(report, name, kernel, f"causal, values of {value_dim}", block, CAUSAL)


def check_far_rows(report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device) -> None:
    """The last rows of tensors with more than 2^31 elements: their offsets need 64 bits."""
    dim = sizes.speed_head_dims[-1]
    last = sizes.far_rows // 2 if sizes.far_rows < 256 else 128
    needed = 24 * 128 * dim * sizes.far_rows  # bytes of 16-bit inputs, float32 ones before them, and results
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed:
        return
    few = slice(sizes.far_rows - last, sizes.far_rows)
    far_queries = RandomBlock.random(sizes.far_rows, last, 8, 16, dim, torch.bfloat16, device)
    far_queries.dout[: few.start] = 0  # so that gradients of keys come from the last rows
    for name, kernel in kernels(names, device, torch.bfloat16, dim):
        if _takes(kernel, FULL, sizes.far_rows, last):
            _add_far(report, name, kernel, "far queries", far_queries, (few, slice(None)), FULL)
    del far_queries
    far_keys = RandomBlock.random(last, sizes.far_rows, 128, 1, dim, torch.bfloat16, device)
    first = torch.full((1, last), few.start, dtype=torch.int32, device=device)
    for name, kernel in kernels(["triton"] if "triton" in names else [], device, torch.bfloat16, dim):
        _add_far(report, name, kernel, "far keys", far_keys, (slice(None), few), KeyRanges(first, first + last))


def _takes(kernel: Kernel, mask: PieceMask, rows: int, keys: int) -> bool:
    """Whether a kernel computes a block in one piece."""
    return not isinstance(kernel, Library) or kernel.takes(Piece(slice(0, rows), slice(0, keys), mask), rows, keys)


def _add_block(
    report: CheckReport,
    name: str,
    kernel: Kernel,
    what: str,
    block: RandomBlock,
    mask: PieceMask,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> None:
    """Adds the errors of a block, unless the kernel computes no such block."""
    rows, heads, group, dim = block.q.shape
    if not _takes(kernel, mask, rows, len(block.k)):
        return

    def errors() -> list[float]:
        return block_errors(kernel, block, mask, softcap, deterministic)

    row = {"backend": name, "mask": what, "head_dim": dim, "heads": f"{heads * group}:{heads}"}
    add_errors(report, "blocks against float64", errors, block.q.dtype, **row)


def block_errors(
    kernel: Kernel, block: RandomBlock, mask: PieceMask, softcap: float = 0.0, deterministic: bool = False
) -> list[float]:
    """The errors of a block. Only the kernel runs in deterministic mode: cuBLAS would refuse the definition there."""
    q, k, v, dout = block
    scores, reference = Scores(q.shape[-1] ** -0.5, softcap), Reference()
    out, lse = reference.forward(q, k, v, mask, scores)
    delta = (dout.double() * out).sum(-1)
    expected = out, lse, *reference.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores)
    grad = BlockGrad(dout, q, k, v, lse.float(), delta.float(), mask)
    with deterministic_mode() if deterministic else nullcontext():
        got = *kernel.forward(q, k, v, mask, scores), *kernel.backward(grad, scores)
    return compare(got, expected)


def _add_far(
    report: CheckReport,
    name: str,
    kernel: Kernel,
    what: str,
    block: RandomBlock,
    compared: tuple[slice, slice],
    mask: PieceMask,
) -> None:
    """Adds the errors in the compared rows of queries and keys, which alone see each other and have gradients."""
    q = block.q
    row = {"backend": name, "mask": what, "head_dim": q.shape[-1], "heads": f"{q.shape[1] * q.shape[2]}:{q.shape[1]}"}
    table = "blocks against float64"
    add_errors(report, table, lambda: _far_errors(kernel, block, compared, mask), q.dtype, **row)


def _far_errors(kernel: Kernel, block: RandomBlock, compared: tuple[slice, slice], mask: PieceMask) -> list[float]:
    rows, keys = compared
    q, k, v, dout = block
    scores, reference = Scores(q.shape[-1] ** -0.5), Reference()
    near = q[rows], k[keys], v[keys]
    out, lse = reference.forward(*near, FULL, scores)
    delta = (dout[rows].double() * out).sum(-1)
    expected = out, lse, *reference.backward(BlockGrad(dout[rows], *near, lse, delta, FULL), scores)
    whole_lse, whole_delta = (torch.zeros(q.shape[:3], device=q.device) for _ in range(2))
    got_out, got_lse = kernel.forward(q, k, v, mask, scores)
    whole_lse.copy_(got_lse)
    whole_delta[rows] = delta.float()
    dq, dk, dv = kernel.backward(BlockGrad(dout, q, k, v, whole_lse, whole_delta, mask), scores)
    return compare((got_out[rows], got_lse[rows], dq[rows], dk[keys], dv[keys]), expected)


def check_strategies(report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device) -> None:
    """Every strategy, with all ranks in this process and the default backend; attention2d's step masks with each."""
    dim, dtype = 64, torch.bfloat16
    auto = kernel_for(device, dtype, dim)
    for n, rows in product(sizes.ranks, sizes.rows_per_rank):
        length = n * rows
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
                    with suppress(UsageError):  # the strategy does not support the rank count, or the backend the mask
                        cp = AllRanks(n, strategy, **options)
                        compute = partial(_strategy_errors, cp, kernel, (q, k, v, dout), expected, mask)
                        row = {"strategy": strategy, "layout": cp.layout, "ranks": n, "rows": rows, "mask": what}
                        row["backend"] = name
                        add_errors(report, "strategies against float64", compute, dtype, **row)


def _strategy_errors(
    cp: AllRanks, kernel: Kernel, tensors: tuple[Tensor, ...], expected: tuple[Tensor, ...], mask: dict[str, Any]
) -> list[float]:
    return compare(distributed(cp, kernel, *tensors, **mask), expected)


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
