"""Every strategy between real processes over gloo, against exact attention."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.context_parallel import STRATEGIES, ContextParallel, context_parallel_attention
from megatron.context_parallel.kernels.reference import attention
from megatron.context_parallel.tokens.layout import unshard
from tests.support.backtrace import backtrace
from tests.support.ranks import Ranks

LENGTH, BATCH, DIM = 48, 2, 16


def _whole(heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(heads)
    shapes = [(LENGTH, BATCH, h, DIM) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _on_rank(
    name: str, layout: str | None, heads: int, kv_heads: int, dtype: torch.dtype, options: dict
) -> list[list[torch.Tensor]]:
    """For both masks: out, lse, dq, dk and dv of this rank's chunk, and the number of the chunk."""
    cp = ContextParallel(name, layout, **options)
    results = []
    for causal in (True, False):
        q, k, v, dout = (cp.shard(x) for x in _whole(heads, kv_heads, dtype))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = context_parallel_attention(*leaves, cp, causal=causal, return_lse=True)
        results.append([out.detach(), lse, *torch.autograd.grad(out, leaves, dout)])
    return [cp.layout, cp.chunk, *results]


def check(ranks, n, heads, kv_heads, strategies) -> None:
    """Every (strategy, layout, options) on n ranks against exact attention."""
    whole = _whole(heads, kv_heads, torch.float32)
    expected = []
    for causal in (True, False):
        leaves = [x.double().requires_grad_() for x in whole[:3]]
        out, lse = attention(*leaves, causal=causal, scale=DIM**-0.5)
        expected.append([out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, whole[3].double())])
    for name, layout, options in strategies:
        per_rank = ranks(n, _on_rank, name, layout, heads, kv_heads, torch.float32, options)
        by_chunk = sorted(per_rank, key=lambda result: result[1])
        for mask, exact in enumerate(expected):
            for i, what in enumerate(("out", "lse", "dq", "dk", "dv")):
                got = unshard([r[2 + mask][i] for r in by_chunk], by_chunk[0][0]).double()
                error = (got - exact[i]).norm() / exact[i].norm()
                assert error < 2e-6, f"{name} {layout} {options} n={n} {what}: {error:.1e}"


@pytest.mark.parametrize("n,heads,kv_heads", [(2, 4, 4), (3, 6, 1)])
def test_exact_between_processes(ranks, n, heads, kv_heads):
    check(
        ranks, n, heads, kv_heads, [(name, x, {}) for name in ("ring", "allgather") for x in STRATEGIES[name].layouts]
    )


def test_every_strategy_on_six_ranks(ranks):
    options = {"usp": {"head_parallel_size": 3}, "loongtrain": {"head_parallel_size": 3, "placement": "context-first"}}
    cases = [(name, None, options.get(name, {})) for name in STRATEGIES]
    cases += [("attention2d", None, {"grid": (3, 2), "overlap": False}), ("mesh", "zigzag", {"grid": (3, 2)})]
    cases += [("lightseq", None, {"balance": False, "prefetch": False}), ("mesh", None, {"head_parallel_size": 3})]
    check(ranks, 6, 6, 3, cases)


def test_a_rank_that_is_done_waits_until_all_have_connected(ranks):
    for _ in range(10):
        assert ranks(4, abs, -1) == [1] * 4


def _crash() -> None:
    signal.raise_signal(signal.SIGSEGV)  # in this thread, which goes no further


def test_a_rank_of_the_tests_that_crashes_shows_where(monkeypatch):
    monkeypatch.setenv("PATH", "")  # gdb would read all of PyTorch's symbols
    pool = Ranks(1)
    try:
        with pytest.raises(AssertionError, match=r"exit codes: \{0: -11\}") as failed:
            pool(1, _crash)
    finally:
        pool.close()
    assert "Segmentation fault" in str(failed.value) and "in _crash" in str(failed.value)


def test_a_crash_shows_native_frames(tmp_path):
    if not shutil.which("gdb") or Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("needs gdb, and a kernel that writes cores into a folder")
    imports = "import os, sys; from tests.support.backtrace import Path, record_crash"
    crash = f"{imports}; record_crash(Path(sys.argv[1])); os.kill(os.getpid(), 11)"
    began, here = time.time(), {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", crash, str(tmp_path / "frames")], env=here)
    assert done.returncode == -signal.SIGSEGV
    assert re.search(r"#\d+ .*kill", backtrace(tmp_path / "frames", began))
    assert backtrace(tmp_path / "frames", began).startswith("Fatal Python error: Segmentation fault")  # no core is left
