"""Compiles the position kernel for all checked sizes, in many processes at once. Triton keeps the results on disk."""

import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from typing import NamedTuple

import torch

from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, PieceMask

from .common import CheckReport, CheckSizes, RandomBlock, deterministic_mode, said
from .errors import BOUNDS, SOFTCAP, last_keys


class Compiled(NamedTuple):
    """One set of kernels: a dtype by its name, sizes of heads, and options."""

    dtype: str
    dim: int
    value_dim: int
    softcap: float = 0.0
    deterministic: bool = False


def sets(sizes: CheckSizes) -> list[Compiled]:
    """What the other stages use, the slowest to compile first."""
    found = [Compiled("bfloat16", *sizes.value_dims)]
    for dim in sorted(sizes.head_dims, reverse=True):
        found.append(Compiled("bfloat16", dim, dim))
    for dim in sizes.head_dims[:2]:
        found.append(Compiled("bfloat16", dim, dim, SOFTCAP))
        found.append(Compiled("bfloat16", dim, dim, deterministic=True))
    first = sizes.head_dims[0]
    for dtype in BOUNDS:
        if dtype is not torch.bfloat16:
            found.append(Compiled(str(dtype).removeprefix("torch."), first, first))
    return found


def compile_kernels(report: CheckReport, names: list[str], sizes: CheckSizes, device: torch.device) -> None:
    """Runs a small block of each set and mask, in a process of its own; on the CPU in this process."""
    if "triton" not in names:
        return
    if device.type == "cpu":
        for one in sets(sizes):
            _add(report, one, *_compile(one, sizes.block_rows, device))
        return
    workers = min(len(sets(sizes)), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(_compile, one, sizes.block_rows, device): one for one in sets(sizes)}
        for job in as_completed(jobs):
            ended = job.exception()  # a compiler may end its process
            _add(report, jobs[job], *((0.0, said(ended)) if ended else job.result()))


def _add(report: CheckReport, one: Compiled, seconds: float, wrong: str) -> None:
    report.add("compiled", **one._asdict(), seconds=round(seconds, 1), wrong=wrong)


def _compile(one: Compiled, rows: int, device: torch.device) -> tuple[float, str]:
    """Seconds, and what went wrong."""
    start = time.monotonic()
    try:
        with deterministic_mode() if one.deterministic else nullcontext():
            _run(one, rows, device)
    except Exception as error:  # whatever Triton or its compiler raises: the other sets are compiled all the same
        return time.monotonic() - start, said(error)
    return time.monotonic() - start, ""


def _run(one: Compiled, rows: int, device: torch.device) -> None:
    dtype = getattr(torch, one.dtype)
    kernel = kernel_for(device, dtype, one.dim, "triton", value_dim=one.value_dim, softcap=one.softcap)
    up = torch.arange(1, rows + 1, dtype=torch.int32, device=device)[None]
    masks: list[PieceMask] = [
        FULL,
        CAUSAL,
        KeyRanges(up - up, up),
        KeyRanges(torch.cat([up - up] * 2), torch.cat([up] * 2)),
    ]
    for heads, group in ((4, 1), (2, 8)):
        for mask in masks:
            q, k, v, dout = RandomBlock.random(rows, rows, heads, group, one.dim, dtype, device, one.value_dim)
            scores = Scores(one.dim**-0.5, one.softcap)
            _, lse = kernel.forward(q, k, v, mask, scores)
            kernel.backward(BlockGrad(dout, q, k, v, lse, torch.zeros_like(lse), mask), scores)
        few = RandomBlock.random(3, rows, heads, group, one.dim, dtype, device, one.value_dim)
        for mask in (FULL, last_keys(few)):
            kernel.forward(*few[:3], mask, Scores(one.dim**-0.5, one.softcap))
