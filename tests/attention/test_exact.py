"""Every strategy equals exact attention, all ranks in one process: out, lse, dq, dk, dv against float64."""

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, context_parallel_attention
from megatron.context_parallel.kernels.reference import Reference, attention
from tests.support.exact import DIM, HEADS, WHAT, errors, exact, gradients, problem

# The baselines here; every other strategy has a test file of its own.
CASES = [(name, layout) for name in ("ring", "allgather") for layout in STRATEGIES[name].layouts]
OTHERS = [
    ("attention2d", {}),
    ("attention2d", {"overlap": False}),
    ("lightseq", {}),
    ("mesh", {}),
    ("loongtrain", {"head_parallel_size": 4}),
    ("usp", {"head_parallel_size": 2, "placement": "context-first"}),
]
MASKED = [*((*heads, True) for heads in HEADS), (8, 2, False)]  # tests/campaigns/fuzz draws the others
RANKS = [1, 2, 3, 5, 8, 32]


def distributed(name, layout, n, heads, kv_heads, dtype, causal, kernel=None, **options) -> list[torch.Tensor]:
    cp = AllRanks(n, name, layout, **options)

    def run(q, k, v):
        return context_parallel_attention(q, k, v, cp, causal=causal, return_lse=True, kernel=kernel)

    return gradients(run, *problem(n, heads, kv_heads, dtype))


@pytest.mark.parametrize(
    "n,heads,kv_heads,causal", [(n, *case) for n in RANKS for case in (MASKED if n < 32 else MASKED[:1])]
)
def test_float32(n, heads, kv_heads, causal):
    expected = exact(n, heads, kv_heads, torch.float32, causal)
    for name, layout in CASES if n < 32 else CASES[::3]:
        got = distributed(name, layout, n, heads, kv_heads, torch.float32, causal)
        for what, error in zip(WHAT, errors(got, expected), strict=True):
            assert error < 2e-6, f"{name} {layout} {what}: {error:.1e}"


@pytest.mark.parametrize("n,name,options", [((16, 24, 36, 32)[i % 4], *case) for i, case in enumerate(OTHERS)])
def test_other_strategies_on_many_ranks(n, name, options):
    got = distributed(name, None, n, 8, 2, torch.float32, True, **options)
    for what, error in zip(WHAT, errors(got, exact(n, 8, 2, torch.float32, True)), strict=True):
        assert error < 2e-6, f"{what}: {error:.1e}"


@pytest.mark.parametrize("name,layout", CASES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_float64_leaves_no_room_for_error(name, layout, causal):
    """If blocks are exact, only a wrong plan or executor gives an error above float64 rounding."""
    got = distributed(name, layout, 4, 8, 2, torch.float64, causal, Reference())
    assert max(errors(got, exact(4, 8, 2, torch.float64, causal))) < 1e-14


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("heads,kv_heads,causal", MASKED)
def test_bfloat16_is_as_good_as_one_process(n, causal, heads, kv_heads):
    expected = exact(n, heads, kv_heads, torch.bfloat16, causal)
    alone = problem(n, heads, kv_heads, torch.bfloat16)

    def one_process(q, k, v):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k.repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1), 0.0, causal
        )
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    baseline = errors(gradients(one_process, *alone), expected)
    others = [(name, None, options) for name, options in OTHERS if heads % 4 == 0 and n >= 4]
    for name, layout, options in [(*case, {}) for case in CASES] + others:
        got = errors(distributed(name, layout, n, heads, kv_heads, torch.bfloat16, causal, **options), expected)
        for what, ours, theirs in zip(WHAT, got, baseline, strict=True):
            bound = 1e-4 if what == "lse" else 1.5 * theirs
            assert ours < bound, f"{name} {layout} {what}: {ours:.1e} against {theirs:.1e}"


def test_scores_of_ten_thousand_do_not_overflow():
    q, k, v, dout = problem(4, 4, 4, torch.float32)
    q, k = q * 100, k * 100
    wide = [x.double() for x in (q, k, v, dout)]
    expected = gradients(lambda *x: attention(*x, causal=True, scale=DIM**-0.5), *wide)
    cp = AllRanks(4, "ring", "zigzag")
    got = gradients(lambda *x: context_parallel_attention(*x, cp, return_lse=True), q, k, v, dout)
    assert expected[1].abs().max() > 1e4
    assert all(torch.isfinite(x).all() for x in got)
    assert max(errors(got[:2], expected[:2])) < 1e-4
