"""Partials that are sent in the model's dtype: their bytes, their error, and who refuses them."""

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.tokens.mask import Mask
from tests.support.exact import DIM, errors, exact, gradients, problem
from tests.support.wire import count_received

N, HEADS, KV_HEADS = 4, 8, 1
OPTIONS = {"usp": {"head_parallel_size": 2}, "loongtrain": {"head_parallel_size": 2}}  # with replicas of the keys


def computed(cp: AllRanks | ContextParallel, dtype: torch.dtype) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    inputs = problem(N, HEADS, KV_HEADS, dtype)
    parts = inputs if isinstance(cp, AllRanks) else [cp.shard(x) for x in inputs]
    return gradients(lambda *x: context_parallel_attention(*x, cp, return_lse=True), *parts)


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_on_the_wire_are_those_of_the_plan(name, monkeypatch):
    """To the byte. Head swaps send what they sent before; statistics stay in float32."""
    sent = count_received(monkeypatch)
    moved = []
    for narrow in (False, True):
        cp = AllRanks(N, name, partials_in_16_bits=narrow, **OPTIONS.get(name, {}))
        sent.clear()
        computed(cp, torch.bfloat16)
        length, batch = problem(N, HEADS, KV_HEADS, torch.bfloat16)[0].shape[:2]
        shape = Shape(length * batch // N, HEADS, KV_HEADS, DIM, 2)
        plans = [cp.plans.of(Mask(), (length, length), HEADS, KV_HEADS, backward=b) for b in (False, True)]
        assert [sent[r] for r in range(N)] == [sum(received_bytes(p, r, shape) for p in plans) for r in range(N)]
        moved.append(sum(sent.values()))
    assert moved[1] < moved[0] or name == "ulysses"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STRATEGIES)
def test_error(name, dtype):
    """Each rounding on the way adds to that at the end, most in a ring, whose gradients make the most hops."""
    options = OPTIONS.get(name, {})
    wide, narrow = (computed(AllRanks(N, name, partials_in_16_bits=x, **options), dtype) for x in (False, True))
    expected = exact(N, HEADS, KV_HEADS, dtype, True)
    assert torch.equal(wide[1], narrow[1]), "the log-sum-exp is sent as before"
    before, after = (errors(got, expected) for got in (wide, narrow))
    assert (after != before) == (name != "ulysses")  # which sends no partials
    for i in (0, 2, 3, 4):
        assert before[i] <= after[i] * 1.001 and after[i] < (1.7 if name == "ring" else 1.32) * before[i], i


def _between_processes(name: str) -> list[torch.Tensor]:
    return computed(ContextParallel(name, partials_in_16_bits=True), torch.bfloat16)


@pytest.mark.parametrize("name", ["ring", "attention2d"])
def test_between_processes(ranks, name):
    """Bit for bit as in one process."""
    cp = AllRanks(N, name, partials_in_16_bits=True)
    parts = [cp.split(x, None) for x in computed(cp, torch.bfloat16)]
    for got, *wanted in zip(ranks(N, _between_processes, name), *parts, strict=True):
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("spec", ["ring:partials_in_16_bits=yes", "mesh+mesh:partials_in_16_bits=yes"])
def test_refused_for_wider_models(spec):
    """Also if only the backward pass would round."""
    for dtype in (torch.float32, torch.float64):
        q = torch.zeros(8, 1, 2, 4, dtype=dtype)
        with pytest.raises(UsageError, match=f"--cp-partials-in-16-bits: q, k, v of {dtype}; give bfloat16 or float16"):
            context_parallel_attention(q, q, q, AllRanks(4, spec))
