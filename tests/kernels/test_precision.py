"""Precision beside a key that takes almost all weight, and invisible tokens with any contents."""

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, context_parallel_attention
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.delta import output_with
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, KeyRanges
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.kernels.reference import Reference, attention
from megatron.context_parallel.kernels.softcap import SoftcapCpu
from megatron.context_parallel.tokens.documents import Documents

DIM = 64


def gradients(function, q, k, v, dout) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def worst_row(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error of a row, relative to that row."""
    error = (got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-300)
    return float(error[1:].max())  # row 0 sees the first key only, whose value is 0


def sink(weight: float) -> list[torch.Tensor]:
    """q, k, v, dout: beside the first key, whose value is 0, any other has about this weight."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(160, 1, 2, DIM) for _ in range(4))  # more than one process halves
    q[..., 0], k[..., 0] = 8, 0
    k[0], v[0] = 0, 0
    k[0, ..., 0] = 0.5 - torch.tensor(weight).log()
    return [q, k, v, dout]


@pytest.mark.parametrize("weight", [1e-2, 1e-6])
def test_small_weights_beside_a_sink_keep_their_digits(weight):
    inputs = sink(weight)
    wanted = gradients(lambda *x: attention(*x, causal=True, scale=0.125)[0], *(x.double() for x in inputs))
    for name, strategy in STRATEGIES.items():
        for n in (1, 8):
            options = {"head_parallel_size": 2} if name in ("ulysses", "loongtrain", "usp") and n > 1 else {}
            if name == "ulysses" and n > 2:
                n = 2  # as many as there are heads
            for layout in strategy.layouts:
                cp = AllRanks(n, name, layout, **options)
                got = gradients(lambda *x, cp=cp: context_parallel_attention(*x, cp), *inputs)
                errors = [worst_row(a, b) for a, b in zip(got, wanted, strict=True)]
                assert errors[0] < 2e-6 and max(errors) < 6e-6, f"{name} {layout} {n}: {errors}"


def test_nan_of_one_side_stays_in_a_merge():
    nan = float("nan")
    out, lse = torch.ones(2, 1), torch.tensor([0.0, nan])
    merge(out, lse, torch.ones(2, 1), torch.tensor([nan, 0.0]))
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e19])
def test_gradients_of_any_size_get_their_delta(size):
    """Squares of 1e-20 and 1e19 are no float32 numbers."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(16, 1, 8) for _ in range(4))
    q, dout = q.unsqueeze(2), dout.unsqueeze(2) * size
    out, lse = Reference().forward(q, k, v, CAUSAL, Scores(0.5))
    delta = (dout.double() * out).sum(-1)
    wanted = Reference().backward(BlockGrad(dout, q, k, v, lse, delta, CAUSAL), Scores(0.5))
    got = AtenFlash().backward(BlockGrad(dout, q, k, v, lse.float(), delta.float(), CAUSAL), Scores(0.5))
    assert all(
        ((a / size).double() - b / size).norm() < 2e-6 * (b / size).norm() for a, b in zip(got, wanted, strict=True)
    )
    assert output_with(torch.zeros(1), torch.zeros(1, 8)).count_nonzero() == 0


def poisoned(x: torch.Tensor, rows: torch.Tensor, value: float) -> torch.Tensor:
    return x.clone().index_fill_(0, rows, value)


@pytest.mark.parametrize("value_dim", [16, 8, 24])
@pytest.mark.parametrize("kernel,scores", [(AtenFlash(), Scores(0.25)), (SoftcapCpu(), Scores(0.25, 2.0))])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_rows_that_nobody_sees_do_not_matter_to_tiles(value, kernel, scores, value_dim):
    """Bit for bit: keys 0, 1, 40 .. 49 and 90 .. are seen by no row; rows 20 .. 29 see nothing."""
    torch.manual_seed(0)
    q, dout = (torch.randn(60, 2, 2, dim) for dim in (16, value_dim))
    k, v = (torch.randn(100, 2, dim) for dim in (16, value_dim))
    row, blind, unseen = torch.arange(60), torch.arange(20, 30), torch.tensor([0, 1, *range(40, 50), *range(90, 100)])
    first = torch.where(row < 20, 2 + row, torch.where(row < 30, 45, 50 + row - 30))
    end = torch.where(row < 20, 21 + row, torch.where(row < 30, 45, 61 + row - 30))
    mask = KeyRanges(first[None].int(), end[None].int())
    out, lse = kernel.forward(q, k, v, mask, scores)
    delta = (dout * out).sum(-1)
    grads = kernel.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores)
    q, k, v = poisoned(q, blind, value), poisoned(k, unseen, value), poisoned(v, unseen, value)
    for a, b in zip(kernel.forward(q, k, v, mask, scores), (out, lse), strict=True):
        assert torch.equal(a, b)
    dout = poisoned(dout, blind, 3e38)
    for a, b in zip(kernel.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores), grads, strict=True):
        assert torch.equal(a, b)
    assert grads[1].any() and not grads[1][unseen].any() and not grads[0][blind].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_dim,softcap", [(16, 0.0), (8, 0.0), (24, 2.0)])
def test_padding_may_hold_anything(causal, value_dim, softcap):
    """On every layout: short documents go to tiles, long ones to full and causal blocks."""
    torch.manual_seed(0)
    ids = torch.tensor([0] * 5 + [-1] * 7 + [1] * 90 + [-1] * 3 + [2] * 9 + [3] * 2 + [-1] * 12)
    padding = (ids < 0).nonzero().flatten()
    documents = Documents(ids)
    inputs = [torch.randn(128, 1, 2, dim) for dim in (16, 16, value_dim, value_dim)]
    bad = [poisoned(x, padding, float("nan")) for x in inputs[:3]] + [poisoned(inputs[3], padding, 3e38)]
    for name in ("ring", "attention2d"):
        for layout in STRATEGIES[name].layouts:
            cp = AllRanks(4, name, layout)

            def run(*x, cp=cp):
                return context_parallel_attention(*x, cp, causal=causal, documents=documents, softcap=softcap)

            for a, b in zip(gradients(run, *bad), gradients(run, *inputs), strict=True):
                assert torch.equal(a, b), f"{name} {layout}"
                assert not a[padding].any()


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_scale_must_be_positive(scale):
    q = torch.randn(8, 1, 1, 8)
    with pytest.raises(UsageError, match=rf"softmax scale {scale}: .* such as 0\.125"):
        context_parallel_attention(q, q, q, AllRanks(2), scale=scale)
