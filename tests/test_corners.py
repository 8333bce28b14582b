"""Attention beyond plain self-attention: sinks, value heads of another size, queries and keys of different lengths."""

import pytest
import torch
from test_exact import errors
from torch import Tensor

from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.layout import unshard
from megatron.context_parallel.mask import Documents

WHAT = ("out", "lse", "dq", "dk", "dv", "dsinks")
CASES = [(name, layout) for name, strategy in STRATEGIES.items() for layout in strategy.layouts]
OPTIONS = {
    "usp": {"head_parallel_size": 2},
    "loongtrain": {"head_parallel_size": 2, "placement": "context-first"},
    "attention2d": {"overlap": False},
}


def inputs(q_length: int, kv_length: int, heads: int, kv_heads: int, dim: int = 8, value_dim: int = 8) -> list[Tensor]:
    """q, k, v, sinks, dout."""
    torch.manual_seed(q_length + heads)
    shapes = [(kv_length, 2, kv_heads, dim), (kv_length, 2, kv_heads, value_dim), (heads,)]
    return [torch.randn(s) for s in ((q_length, 2, heads, dim), *shapes, (q_length, 2, heads, value_dim))]


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64: out and log-sum-exp; `seen` bool [s, t]."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()[..., : len(k)]
    return torch.einsum("bhij,jbhd->ibhd", weights, v), lse.permute(2, 0, 1)


def bottom_right(s: int, t: int, causal: bool, window: int = -1) -> Tensor:
    """Which keys are seen, the last query standing at the last key: bool [s, t]."""
    back = torch.arange(t - s, t).unsqueeze(1) - torch.arange(t)
    seen = torch.ones(s, t, dtype=torch.bool)
    if causal:
        seen &= back >= 0
    return seen & (back <= window) if window >= 0 else seen


def results(function, q, k, v, sinks, dout) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out, lse = function(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(got: list[Tensor], tensors: list[Tensor | None], seen: Tensor) -> None:
    wide = [x if x is None else x.double() for x in tensors]
    expected = results(lambda q, k, v, sinks=None: dense(q, k, v, sinks, seen), *wide)
    for a, b in zip((got[1], expected[1]), (expected[1], got[1]), strict=True):
        assert torch.equal(a.isneginf(), b.isneginf())
    got, expected = ([x.nan_to_num(neginf=0.0) for x in of] for of in (got, expected))
    for what, error in zip(WHAT, errors(got, expected), strict=False):
        assert error < 2e-6, f"{what}: {error:.1e}"


def run(cp, causal: bool, window: int = -1):
    def function(q, k, v, sinks=None):
        how = {"causal": causal, "window": (window, -1), "sinks": sinks, "return_lse": True}
        return context_parallel_attention(q, k, v, cp, **how)

    return function


@pytest.mark.parametrize("name,layout", CASES)
def test_sinks_and_cross_lengths(name, layout):
    for n, heads, kv_heads in ((1, 4, 2), (4, 8, 4), (6, 6, 1)):
        cp = AllRanks(n, name, layout, **(OPTIONS.get(name, {}) if n > 1 else {}))
        for q_length, kv_length in ((48, 48), (48, 96), (72, 24)):
            for causal, window in ((True, -1), (False, -1), (True, 30)):
                tensors = inputs(q_length, kv_length, heads, kv_heads)
                got = results(run(cp, causal, window), *tensors)
                check(got, tensors, bottom_right(q_length, kv_length, causal, window))


def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all():
    q, k, v, sinks, dout = inputs(32, 32, 4, 4)
    cp = AllRanks(4)
    plain = results(run(cp, True), q, k, v, None, dout)
    for a, b in zip(results(run(cp, True), q, k, v, torch.full_like(sinks, -torch.inf), dout), plain, strict=False):
        assert torch.equal(a, b)
    out, lse, *_, dsinks = results(run(cp, True), q, k, v, torch.full_like(sinks, 1e4), dout)
    assert out.abs().max() == 0 and (lse == 1e4).all() and torch.isfinite(dsinks).all()


def _on_rank(name: str, layout: str, options: dict, lengths: tuple[int, int], causal: bool) -> tuple:
    cp = ContextParallel(name, layout, **options)
    q, k, v, sinks, dout = inputs(*lengths, 8, 4)
    q, k, v, dout = (cp.shard(x) for x in (q, k, v, dout))
    return cp.chunk, results(run(cp, causal), q, k, v, sinks, dout)


@pytest.mark.parametrize("lengths,causal", [((24, 48), True), ((48, 24), False)])
def test_sinks_and_cross_lengths_between_processes(ranks, lengths, causal):
    for name, layout in [(name, strategy.layouts[-1]) for name, strategy in STRATEGIES.items()]:
        by_chunk = sorted(ranks(4, _on_rank, name, layout, OPTIONS.get(name, {}), lengths, causal), key=lambda r: r[0])
        *rows, dsinks = zip(*(got for _, got in by_chunk), strict=True)
        got = [*(unshard(list(x), layout) for x in rows), sum(dsinks)]
        check(got, inputs(*lengths, 8, 4), bottom_right(*lengths, causal))


# -- what cannot be computed says so --------------------------------------------------------------------------


def attend(cp=None, *, q=(8, 1, 2, 4), k=None, v=None, dtype=torch.float32, **how):
    k = k or q
    tensors = [torch.zeros(shape, dtype=dtype) for shape in (q, k, v or k)]
    return context_parallel_attention(*tensors, cp or AllRanks(2), **how)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: attend(dtype=torch.int32), r"q, k, v of torch.int32: need one of torch.float32, "),
        (lambda: attend(dtype=torch.complex64), r"q, k, v of torch.complex64: need one of"),
        (lambda: attend(dtype=torch.float8_e4m3fn), r"q, k, v of torch.float8_e4m3fn: need one of"),
        (lambda: attend(q=(0, 1, 2, 4)), r"q \[0, 1, 2, 4\].*: a size is 0"),
        (lambda: attend(k=(8, 1, 2, 5)), r"need q \[s, b, heads, d\], k \[t, b, kv_heads, d\]"),
        (lambda: attend(k=(8, 1, 2, 4), v=(4, 1, 2, 4)), r"need q \[s, b, heads, d\]"),
        (lambda: attend(q=(8, 2, 4)), r"q \[8, 2, 4\]"),
        (lambda: attend(k=(6, 1, 2, 4)), r"--seq-length 6: the zigzag layout over 2 ranks needs a multiple of 4"),
        (lambda: attend(sinks=torch.zeros(3)), r"sinks \[3\] of torch.float32 on cpu: need floating-point \[2\]"),
        (lambda: attend(sinks=torch.zeros(2).long()), r"sinks \[2\] of torch.int64"),
        (
            lambda: attend(k=(16, 1, 2, 4), documents=Documents(torch.zeros(8).long())),
            "documents with 8 queries and 16 keys: need queries and keys of one length",
        ),
        (
            lambda: context_parallel_attention(
                torch.zeros(8, 1, 2, 4, device="meta"), *[torch.zeros(8, 1, 2, 4)] * 2, AllRanks(2)
            ),
            "q, k, v on meta, cpu, cpu: need one device",
        ),
        (lambda: AllRanks(2, "ring", causal=False), "--cp-strategy ring: no option causal; it has none"),
        (lambda: AllRanks(4, "mesh", backward=True), "--cp-strategy mesh: no option backward; it has grid"),
        (lambda: AllRanks(0), "0 ranks: need a whole number, 1 or more, such as 4"),
        (lambda: AllRanks("2"), "'2' ranks: need a whole number"),
        (lambda: AllRanks(2.0), "2.0 ranks: need a whole number"),
        (lambda: AllRanks(4, "usp", head_parallel_size="2"), "--cp-head-parallel-size 2: "),
        (lambda: AllRanks(4, "loongtrain", inner_ring_size="2"), "--cp-inner-ring-size 2: "),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_second_derivatives_are_refused():
    q = torch.randn(8, 1, 2, 4, requires_grad=True)
    out = context_parallel_attention(q, q, q, AllRanks(2))
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UsageError, match="second derivatives: context_parallel_attention has first derivatives only"):
        grad.sum().backward()


def test_in_inference_mode():
    q = torch.randn(8, 1, 2, 4)
    expected = context_parallel_attention(q, q, q, AllRanks(2))
    with torch.inference_mode():
        x = q.clone()
        assert torch.equal(context_parallel_attention(x, x, x, AllRanks(2)), expected)
    with torch.inference_mode():
        assert torch.equal(context_parallel_attention(q, q, q, AllRanks(2)), expected)


def test_compiled():
    """torch.compile leaves attention as it is and compiles what is around it."""
    cp, q = AllRanks(2), torch.randn(8, 1, 2, 4, requires_grad=True)

    def layer(x):
        return context_parallel_attention(x * 2, x, x, cp) + 1

    (expected,) = torch.autograd.grad(layer(q).sum(), q)
    (got,) = torch.autograd.grad(torch.compile(layer, backend="eager")(q).sum(), q)
    assert torch.equal(got, expected)
