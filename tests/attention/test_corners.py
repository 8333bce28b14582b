"""Sinks, softcap, value heads of another size, and queries and keys of different lengths."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from megatron.context_parallel import LAYOUTS, STRATEGIES, AllRanks, ContextParallel, UsageError
from megatron.context_parallel.attention.api import context_parallel_attention
from megatron.context_parallel.cluster.search.candidates import Workload
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import positions, shard, unshard
from tests.support.dense import dense_attention, visible
from tests.support.exact import errors

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


def bottom_right(s: int, t: int, causal: bool, window: int = -1) -> Tensor:
    """Visible keys, with the last query at the position of the last key: bool [1, s, t]."""
    return visible(torch.arange(t - s, t), torch.arange(t), causal, (window, -1))


def results(function, q, k, v, sinks, dout) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out, lse = function(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(got: list[Tensor], tensors: list[Tensor | None], seen: Tensor, softcap: float = 0.0) -> None:
    wide = [x if x is None else x.double() for x in tensors]
    expected = results(lambda q, k, v, sinks=None: dense_attention(q, k, v, seen, softcap=softcap, sinks=sinks), *wide)
    for a, b in zip((got[1], expected[1]), (expected[1], got[1]), strict=True):
        assert torch.equal(a.isneginf(), b.isneginf())
    got = [x.nan_to_num(neginf=0.0) for x in got]
    expected = [x.nan_to_num(neginf=0.0) for x in expected]
    for what, error in zip(WHAT, errors(got, expected), strict=False):
        assert error < 2e-6, f"{what}: {error:.1e}"


def run(cp, causal: bool, window: int = -1, softcap: float = 0.0):
    def function(q, k, v, sinks=None):
        how = {"causal": causal, "window": (window, -1), "softcap": softcap, "sinks": sinks}
        return context_parallel_attention(q, k, v, cp, return_lse=True, **how)

    return function


@pytest.mark.parametrize("name,layout", CASES)
def test_sinks_and_cross_lengths(name, layout):
    masks = (True, -1), (False, -1), (True, 30)
    for i, (n, heads, kv_heads) in enumerate(((1, 4, 2), (4, 8, 4), (6, 6, 1))):
        cp = AllRanks(n, name, layout, **(OPTIONS.get(name, {}) if n > 1 else {}))
        for j, (q_length, kv_length) in enumerate(((48, 48), (48, 96), (72, 24))):
            causal, window = masks[(i + j) % 3]  # on one of the numbers of ranks each length meets each mask
            tensors = inputs(q_length, kv_length, heads, kv_heads)
            got = results(run(cp, causal, window), *tensors)
            check(got, tensors, bottom_right(q_length, kv_length, causal, window))
    # Queries before the first key see it too.
    check(results(run(cp, False, 5), *tensors), tensors, bottom_right(q_length, kv_length, False, 5))


@pytest.mark.parametrize("name,layout", CASES)
def test_value_heads_of_another_size(name, layout):
    """With 2 key/value heads, of which ranks of larger head groups have replicas."""
    cp = AllRanks(4, name, layout, **OPTIONS.get(name, {}))
    for dim, value_dim, kv_length, window in ((16, 8, 48, -1), (8, 24, 96, 30)):
        tensors = inputs(48, kv_length, 8, 2, dim, value_dim)
        got = results(run(cp, True, window), *tensors)
        check(got, tensors, bottom_right(48, kv_length, True, window))


SOFTCAP = 3.0


def large(dim: int, value_dim: int) -> list[Tensor]:
    """Inputs whose scores have a deviation of 4 before the softcap."""
    q, *others = inputs(48, 48, 8, 4, dim, value_dim)
    return [4 * q, *others]


@pytest.mark.parametrize("name", ["ring", "allgather", "mesh", "loongtrain"])
def test_softcap(name):
    for layout in STRATEGIES[name].layouts:
        cp = AllRanks(4, name, layout, **OPTIONS.get(name, {}))
        for value_dim, causal, window in ((8, True, -1), (24, True, 20), (8, False, -1)):
            tensors = large(8, value_dim)
            got = results(run(cp, causal, window, SOFTCAP), *tensors)
            check(got, tensors, bottom_right(48, 48, causal, window), SOFTCAP)


def test_a_negative_softcap_is_refused():
    q = torch.zeros(8, 1, 2, 4)
    with pytest.raises(UsageError, match=r"softcap -3\.0: must be positive, such as 50\.0, or 0 for none"):
        context_parallel_attention(q, q, q, AllRanks(2), softcap=-3.0)


def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all():
    q, k, v, sinks, dout = inputs(32, 32, 4, 4)
    cp = AllRanks(4)
    plain = results(run(cp, True), q, k, v, None, dout)
    for a, b in zip(results(run(cp, True), q, k, v, torch.full_like(sinks, -torch.inf), dout), plain, strict=False):
        assert torch.equal(a, b)
    out, lse, *_, dsinks = results(run(cp, True), q, k, v, torch.full_like(sinks, 1e4), dout)
    assert out.abs().max() == 0 and (lse == 1e4).all() and torch.isfinite(dsinks).all()


def _on_rank(name: str, layout: str, tensors: list[Tensor], causal: bool, softcap: float = 0.0) -> tuple:
    cp = ContextParallel(name, layout, **OPTIONS.get(name, {}))
    q, k, v, sinks, dout = tensors
    q, k, v, dout = (cp.shard(x) for x in (q, k, v, dout))
    return cp.chunk, results(run(cp, causal, softcap=softcap), q, k, v, sinks, dout)


def narrow_sinks() -> list[Tensor]:
    """`inputs` with sinks in bfloat16."""
    q, k, v, sinks, dout = inputs(128, 128, 8, 4)
    return [q, k, v, sinks.bfloat16(), dout]


def _sinks_on_rank(name: str) -> Tensor:
    cp = ContextParallel(name, **OPTIONS.get(name, {}))
    q, k, v, sinks, dout = narrow_sinks()
    return results(run(cp, True), *(cp.shard(x) for x in (q, k, v)), sinks, cp.shard(dout))[-1]


def test_gradients_of_sinks_are_rounded_once(ranks):
    """The gradients of a rank's sinks are summed in float32, in one process and between processes."""
    expected = results(run(AllRanks(1), True), *(x.double() for x in narrow_sinks()))[-1]
    found = [
        results(run(AllRanks(n, name, **OPTIONS.get(name, {})), True), *narrow_sinks())[-1]
        for n, name in ((32, "ring"), (32, "attention2d"), (8, "usp"))
    ]
    found += [sum(ranks(4, _sinks_on_rank, name)) for name in ("ring", "usp")]
    for dsinks in found:
        assert dsinks.dtype is torch.bfloat16
        assert ((dsinks - expected).abs() <= 1.001 * 2**-8 * expected.abs()).all()  # half a unit in the last place


def between_processes(ranks, name: str, *args) -> list[Tensor]:
    """The results of `_on_rank` on 4 ranks in the strategy's last layout, as whole tensors."""
    layout = STRATEGIES[name].layouts[-1]
    by_chunk = sorted(ranks(4, _on_rank, name, layout, *args), key=lambda r: r[0])
    *rows, dsinks = zip(*(got for _, got in by_chunk), strict=True)
    return [*(unshard(list(x), layout) for x in rows), sum(dsinks)]


@pytest.mark.parametrize("lengths,causal", [((24, 48), True), ((48, 24), False)])
def test_sinks_and_cross_lengths_between_processes(ranks, lengths, causal):
    tensors = inputs(*lengths, 8, 4)
    for name in STRATEGIES:
        check(between_processes(ranks, name, tensors, causal), tensors, bottom_right(*lengths, causal))


@pytest.mark.parametrize("softcap,value_dim", [(0.0, 8), (SOFTCAP, 24)])
def test_value_heads_and_softcap_between_processes(ranks, softcap, value_dim):
    tensors = large(16, value_dim)
    for name in ("ring", "attention2d", "mesh", "loongtrain"):
        got = between_processes(ranks, name, tensors, True, softcap)
        check(got, tensors, bottom_right(48, 48, True), softcap)


# -- unsupported inputs raise errors --------------------------------------------------------------------------


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
        (
            lambda: AllRanks(2, "ring", causal=False),
            "--cp-strategy ring: no option causal; it has none",
        ),
        (
            lambda: AllRanks(4, "mesh", backward=True),
            "--cp-strategy mesh: no option backward; it has grid",
        ),
        (lambda: AllRanks(0), "0 ranks: need a whole number, 1 or more, such as 4"),
        (lambda: AllRanks("2"), "'2' ranks: need a whole number"),
        (lambda: AllRanks(2.0), "2.0 ranks: need a whole number"),
        # of another type
        (
            lambda: context_parallel_attention(None, *[torch.zeros(8, 1, 2, 4)] * 2, AllRanks(2)),
            "q of type NoneType: need",
        ),
        (lambda: context_parallel_attention(*[torch.zeros(8, 1, 2, 4).to_sparse()] * 3, AllRanks(2)), "q of a sparse"),
        (lambda: attend(causal=None), "causal None: give True, or False"),
        (lambda: attend(causal=1), "causal 1: give True, or False"),
        (lambda: attend(window=None), "--window-size None: "),
        (lambda: attend(documents=torch.zeros(8).long()), r"documents of type Tensor: give Documents\(ids\)"),
        (lambda: attend(sinks=0.0), r"sinks of type float: need a dense tensor \[heads\]"),
        (lambda: attend(sinks=torch.zeros(2).to(torch.float8_e4m3fn)), r"sinks \[2\] of torch.float8_e4m3fn"),
        (
            lambda: attend(kernel="aten"),
            r"kernel of type str: give an object, such as kernels.choose.kernel_for\(q.device",
        ),
        (lambda: attend(kernel=AtenFlash), "kernel the class AtenFlash: give an object"),
        (lambda: attend(scale="0.5"), "scale of type str: give a number"),
        (lambda: attend(scale=True), "scale of type bool: give a number"),
        (lambda: attend(scale=torch.tensor(0.5, requires_grad=True)), "scale of type Tensor: give a number"),
        (lambda: attend(scale=float("nan")), "softmax scale nan: must be positive and finite"),
        (lambda: attend(softcap=None), "softcap of type NoneType: give a number, such as 50.0, or 0 for none"),
        (lambda: attend(return_lse="no"), "return_lse of type str: give True or False"),
        (lambda: attend(kept=[]), r"kept of type list: give collections.deque\(\)"),
        (lambda: attend(tensor_layout=None), "tensor_layout of type NoneType: give one of sbhd, bshd and bhsd"),
        (lambda: attend(cp="ring"), "cp: of type str; give a ContextParallel"),
        (lambda: AllRanks(True), "True ranks: need a whole number"),
        (lambda: AllRanks(2, None), "--cp-strategy None: unknown"),
        (lambda: AllRanks(2, "ring", np.zeros(2)), "--cp-layout .*: unknown"),
        (lambda: AllRanks(2).choice.strategy.plan(2, head_parallel_size=True), "--cp-head-parallel-size True: "),
        (lambda: shard(torch.zeros(8, 2), "zigzag", 0, 2, 2), r"dim 2: need one of the 2 dimensions of \[8, 2\]"),
        (lambda: shard(torch.zeros(8, 2), "zigzag", 0, 2, True), "dim True: need one of"),
        (lambda: shard([0] * 8, "zigzag", 0, 2), "a sequence of type list: need a dense tensor"),
        (lambda: positions("zigzag", 0, 2, 8.0), "length of type float: need a whole number of tokens"),
        (lambda: Documents([0, 0, 1]), "documents of type list: need integers"),
        (lambda: Documents(torch.zeros(8).bool()), r"documents \[8\] of torch.bool: need integers"),
        (
            lambda: Documents(torch.zeros(8, device="meta").long()),
            r"documents \[8\] of torch.int64 on meta: need integers",
        ),
        (lambda: Documents.after(torch.zeros(1, 8).long()), r"ends of documents \[1, 8\] of torch.int64: need bool"),
        (lambda: Documents.after(torch.zeros(8).bool()), r"ends of documents \[8\] of torch.bool: need bool \[samples"),
        (lambda: Documents.packed([0, 8], 8), "cu_seqlens of type list: need integers"),
        (lambda: Documents.packed(torch.tensor([0, 8]), 8.0), "length 8.0 of packed documents: need a whole number"),
        (lambda: Documents.packed(torch.tensor([0, 8]), 8, samples=True), "samples True of packed documents: need"),
        (
            lambda: Documents.packed(torch.tensor([0, 8]), 8, torch.tensor([0, 4, 8])),
            "cu_seqlens_padded of 3 bounds: need 2",
        ),
        (lambda: Workload("long", 8, 8, 64), "workload: length 'long'; need a whole number"),
        (lambda: Workload(64, 8, 3, 64), "workload: 3 key/value heads do not divide 8 heads"),
        (lambda: Workload(64, 8, 8, 64, dtype="float32"), "workload: dtype 'float32'; give one of bf16, fp16, fp32"),
        (lambda: AllRanks(4, "usp", head_parallel_size="two"), "--cp-head-parallel-size two: "),
        (lambda: AllRanks(4, "loongtrain", inner_ring_size=2.5), "--cp-inner-ring-size 2.5: "),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(UsageError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_numbers_of_other_libraries_are_numbers():
    out = attend(scale=np.float32(0.5), softcap=np.int64(3))
    assert torch.equal(out, attend(scale=0.5, softcap=3.0))


def test_a_dimension_may_be_counted_from_the_end():
    x = torch.arange(24).view(3, 8)
    for layout in LAYOUTS:
        parts = [shard(x, layout, chunk, 2, -1) for chunk in range(2)]
        assert all(torch.equal(part, shard(x, layout, chunk, 2, 1)) for chunk, part in enumerate(parts))
        assert torch.equal(unshard(parts, layout, -1), x)


def _forward_mode(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


def _of_dual_gradient(function, x):
    out = function(x.requires_grad_())
    return _forward_mode(lambda dout: torch.autograd.grad(out, x, dout), torch.ones_like(out))


@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.linearize(f, x)[1](x),
        lambda f, x: torch.func.vjp(f, x),
        lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
        _forward_mode,
        lambda f, x: torch.no_grad()(_forward_mode)(f, x),
        _of_dual_gradient,
    ],
)
@pytest.mark.parametrize("spec", ["ring", "usp:head_parallel_size=2"])
def test_other_derivatives_are_refused(spec, derive, monkeypatch):
    """They gave zero, or none."""
    monkeypatch.setenv("PYTORCH_JIT", "0")  # it would compile torch.zeros, which `support_cpu_host` has replaced
    cp, q = AllRanks(2, spec), torch.randn(8, 1, 2, 4)
    with pytest.raises(UsageError, match=r"^(torch.func|forward-mode derivatives|vmap): context_parallel_attention"):
        derive(lambda q: context_parallel_attention(q, q, q, cp), q)


@pytest.mark.parametrize("way", ["torch.export", "torch.jit.trace"])
def test_programs_for_other_processes_are_refused(way):
    """Elsewhere the number of the context group could be that of another one."""

    class Model(torch.nn.Module):
        def forward(self, q):
            return context_parallel_attention(q, q, q, cp)

    cp, make = AllRanks(2), torch.export.export if way == "torch.export" else torch.jit.trace
    with pytest.raises(UsageError, match=f"^{way}: context_parallel_attention belongs to the ranks of this job; use "):
        make(Model(), (torch.randn(8, 1, 2, 4),))


def test_second_derivatives_are_refused():
    q = torch.randn(8, 1, 2, 4, requires_grad=True)
    out = context_parallel_attention(q, q, q, AllRanks(2))
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UsageError, match="second derivatives: context_parallel_attention does not support them"):
        grad.sum().backward()


def test_in_inference_mode():
    q = torch.randn(8, 1, 2, 4)
    expected = context_parallel_attention(q, q, q, AllRanks(2))
    with torch.inference_mode():
        x = q.clone()
        assert torch.equal(context_parallel_attention(x, x, x, AllRanks(2)), expected)
    with torch.inference_mode():
        assert torch.equal(context_parallel_attention(q, q, q, AllRanks(2)), expected)
