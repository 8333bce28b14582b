"""Head parallelism around any strategy, and the double ring: ulysses, usp, loongtrain."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.context_parallel import (
    LAYOUTS,
    STRATEGIES,
    AllRanks,
    ContextParallel,
    UsageError,
    context_parallel_attention,
)
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.plan.ir import HEAD_FIRST, RANK_PLACEMENTS, Plan, Step, T
from megatron.context_parallel.plan.pictures.lanes import picture
from megatron.context_parallel.plan.trace import trace
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import Shape, chunk_bytes, received_bytes, units
from megatron.context_parallel.runtime import head_swap
from megatron.context_parallel.runtime.comm.transport import LocalTransport
from megatron.context_parallel.strategies import head_parallel_sizes
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import positions, rows_in, unshard
from megatron.context_parallel.tokens.mask import Mask
from tests.support.exact import DIM, WHAT, errors, exact, gradients, problem

INNER = [name for name, strategy in STRATEGIES.items() if strategy.head_parallel != "all"]
PASSES = [(causal, backward) for causal in (True, False) for backward in (False, True)]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# -- double ring ----------------------------------------------------------------------------------------------


def gradient_hops(r: int, n: int, w: int) -> int:
    """Gradients rank r receives, causal and contiguous: within its ring for full rounds, in its own round; outside."""

    def ring(place: int, size: int) -> int:
        return max(0, place - 1) + (place < size - 1)

    i, j = divmod(r, w)
    return i * (w - 1) + ring(j, w) + ring(i, n // w)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 12, 24])
def test_double_ring_is_proved_and_moves_what_a_ring_moves(n):
    """LoongTrain section 4.5.3: w-1 transfers an inner ring and one an outer step but the last, (n-1) Size(kv)."""
    for layout in LAYOUTS if n <= 8 else ("zigzag", "contiguous"):
        for causal, backward in PASSES if n <= 8 else [(True, True)]:
            case = {"layout": layout, "causal": causal, "backward": backward}
            ring = verify(STRATEGIES["ring"].plan(n, **case))
            for w in divisors(n) if n <= 24 else (4,):
                report = verify(STRATEGIES["loongtrain"].plan(n, inner_ring_size=w, **case))
                if causal and layout == "contiguous":
                    for r, volume in enumerate(report.volume):
                        assert (volume[T.KV], volume[T.DKV]) == (2 * r, 2 * gradient_hops(r, n, w) * backward)
                    assert sum(v.total() for v in report.volume) == sum(v.total() for v in ring.volume)
                else:
                    rounds = n // w
                    hops = rounds * (w - 1) + rounds - 1
                    assert hops == n - 1
                    assert all(v[T.KV] == 2 * hops and v[T.DKV] == 2 * hops * backward for v in report.volume)
                assert report.idle == pytest.approx(ring.idle, abs=1e-12)
                if w in (1, n):
                    assert (report.volume, report.steps, report.peak) == (ring.volume, ring.steps, ring.peak)


def test_double_ring_goes_round_as_in_algorithm_2():
    """Figure 9: 8 ranks, inner rings of 4. Rank 5 (ring 1, place 1) sees its own ring's chunks, then ring 0's."""
    steps = STRATEGIES["loongtrain"].plan(8, inner_ring_size=4, causal=False).steps[5]
    assert [step.attend[0].kv_chunks[0] for step in steps] == [5, 4, 7, 6, 1, 0, 3, 2]
    channels = []
    for step in steps:
        channels.append(sorted({op.channel for op in step.comm}))
    assert channels == [["inner", "outer"], ["inner"], ["inner"], [], ["inner"], ["inner"], ["inner"], []]


@pytest.mark.parametrize("n,w", [(8, 4), (8, 2), (12, 3), (9, 3)])
@pytest.mark.parametrize("inner,outer", [(0.5, 0.9), (0.9, 2.5), (1.5, 1.0), (0.5, 7.0), (2.0, 9.0)])
def test_inner_and_outer_transfers_overlap(n, w, inner, outer):
    """A round takes as long as the slower of its inner ring and its outer transfer, never their sum."""
    plan = STRATEGIES["loongtrain"].plan(n, inner_ring_size=w)

    def time(transfer) -> float:
        return inner if transfer.sender // w == transfer.receiver // w else outer

    micro_step, rounds = max(1, inner), n // w  # blocks take 1
    ring = micro_step * (w - 1) + 1
    assert trace(plan, transfer_time=time).finish == pytest.approx((rounds - 1) * max(ring, outer) + ring)
    paper = rounds * (micro_step * (w - 1) + max(1, outer))
    assert trace(plan, transfer_time=time).finish <= paper + 1e-9
    single = trace(STRATEGIES["ring"].plan(n), transfer_time=lambda op: outer).finish  # some hop is always slow
    assert trace(plan, transfer_time=time).finish <= max(single, n * micro_step) + 1e-9


def test_on_one_channel_the_transfers_would_queue():
    plan = STRATEGIES["loongtrain"].plan(8, inner_ring_size=4)

    def one_channel(step: Step) -> Step:
        return Step(tuple(replace(op, channel="inner") for op in step.comm), step.attend)

    def time(transfer) -> float:
        return 4.0 if transfer.sender // 4 != transfer.receiver // 4 else 0.9

    queued = replace(plan, steps=tuple(tuple(map(one_channel, steps)) for steps in plan.steps))
    assert trace(plan, transfer_time=time).finish == pytest.approx(8)
    assert trace(queued, transfer_time=time).finish > 8 + 2


def test_backward_hides_the_outer_ring_too():
    """Four rounds of two blocks, an outer message at most a block: gradients only add the last return to the owner."""
    plan = STRATEGIES["loongtrain"].plan(8, inner_ring_size=2, backward=True)
    finish = trace(plan, transfer_time=lambda t: 0.4 if t.sender // 2 == t.receiver // 2 else 0.9).finish
    assert 8 < finish <= 8 + 0.4 + 0.9 + 1e-9


# -- heads around a strategy ----------------------------------------------------------------------------------


def expected(cp: int, hp: int, heads: int, kv_heads: int, backward: bool) -> dict[T, float]:
    """LoongTrain section 4.5.3 and 4.5.4 in units of Size(q)."""
    kv = 2 * max(kv_heads, hp) / heads  # Size(kv)
    swapped = (hp - 1) / hp
    if backward:
        return {
            T.DO: swapped, T.DQ: swapped, T.KV: kv * (cp - 1), T.DKV: kv * (cp - 1) + kv * swapped,
        }  # fmt: skip
    return {T.Q: swapped, T.KV: kv * (cp - 1) + kv * swapped, T.O: swapped}


@pytest.mark.parametrize("n", [*range(1, 13), 16, 24, 33, 48])
def test_volume_is_the_papers(n):
    for hp in divisors(n):
        cp = n // hp
        if cp > 16:
            continue  # verified alone, above
        for name in ("usp" if hp > 1 else "ring", "loongtrain") if cp <= 8 else ("loongtrain",):
            for backward in (False, True):
                plan = STRATEGIES[name].plan(n, head_parallel_size=hp, backward=backward)
                # MHA; GQA that splits; GQA and MQA that need replicas
                for heads, kv_heads in [(hp, hp), (4 * hp, 2 * hp), (2 * hp, hp), (4 * hp, max(1, hp // 2)), (hp, 1)]:
                    if kv_heads != hp and cp > 8:
                        continue  # the ratio does not depend on cp
                    report = verify(plan, plan.kv_ratio(heads, kv_heads))
                    for volume in report.volume:
                        for tensor, count in expected(cp, hp, heads, kv_heads, backward).items():
                            assert volume[tensor] == pytest.approx(count, abs=1e-9), (hp, tensor)
                        assert volume.total() == pytest.approx(
                            sum(expected(cp, hp, heads, kv_heads, backward).values())
                        )


@pytest.mark.parametrize("backward", [False, True])
def test_ends_of_the_range_are_ulysses_and_ring(backward):
    for n in range(1, 65):
        ulysses = verify(STRATEGIES["ulysses"].plan(n, backward=backward))
        assert ulysses.received == pytest.approx(4 * (n - 1) / n)
        assert ulysses.idle == 0
        assert verify(STRATEGIES["loongtrain"].plan(n, head_parallel_size=n, backward=backward)) == ulysses
        if n <= 16:
            ring = verify(STRATEGIES["ring"].plan(n, backward=backward))
            case = {"head_parallel_size": 1, "backward": backward}
            assert verify(STRATEGIES["loongtrain"].plan(n, inner_ring_size=n, **case)) == ring
            two = {"head_parallel_size": 2, "backward": backward}
            assert verify(STRATEGIES["usp"].plan(2 * n, **two)) == verify(STRATEGIES["ring"].plan(2 * n, **two))


@pytest.mark.parametrize("name", INNER)
def test_any_strategy_is_wrapped_unchanged(name):
    strategy = STRATEGIES[name]
    for causal, backward in PASSES:
        alone = STRATEGIES["ring" if name == "usp" else name].plan(4, causal=causal, backward=backward)
        plan = strategy.plan(12, causal=causal, backward=backward, head_parallel_size=3)
        assert [*plan.steps] == [*alone.steps] and (plan.n, plan.all_ranks) == (4, 12)
        inside, whole = verify(alone), verify(plan)
        ours = sum(units(t) for t in (*plan.swaps_before[0].tensors, *plan.swaps_after[0].tensors)) * 2 / 3
        assert ours == pytest.approx(4 * 2 / 3)
        assert whole.received == pytest.approx(inside.received + ours)
        assert max(whole.peak) >= max(inside.peak)


def test_memory_of_ulysses():
    """The larger of: tensors before and after the swap, 3 + 3; then Q, K, V and both forms of O, 3 + 2."""
    assert verify(STRATEGIES["ulysses"].plan(4)).peak == (6,)
    assert verify(STRATEGIES["ulysses"].plan(1)).peak == (4,)


def test_swap_takes_its_time():
    plan = STRATEGIES["usp"].plan(6, head_parallel_size=2)

    def time(transfer) -> float:  # half a chunk of each tensor travels in a swap, a whole one in the ring
        return {T.Q: 3.0, T.KV: 2.0, T.O: 2.0}[transfer.tensor] if transfer.share == 1 / 2 else 0

    assert trace(plan, transfer_time=time).finish == 5 + 3 + 2
    swapped = {bar.texts[0] for bar in picture(plan).bars if "swap" in bar.texts[0]}
    assert swapped == {"swap Q", "swap KV", "swap O"}
    assert "usp, 3 of 6 ranks, for 1/2 of the heads" in picture(plan).title


def test_a_round_hides_the_swaps_beside_it():
    """Three rounds of 9 hide a swap of 3 and a swap back of 2 each; the first and the last swap are not hidden."""
    plan = STRATEGIES["usp"].plan(6, head_parallel_size=2, head_rounds=3)

    def time(transfer) -> float:
        return {T.Q: 2.0, T.KV: 1.0, T.O: 2.0}[transfer.tensor] if transfer.share == 1 / 2 else 0

    assert trace(plan, transfer_time=time, block_time=lambda block, plan: 3.0).finish == 3 + 3 * 9 + 2
    whole = replace(plan, head_rounds=1)
    assert verify(plan).volume == verify(whole).volume
    assert "3 of 6 ranks, for 1/2 of the heads in 3 rounds" in picture(plan).title
    # The rank's own tensors, 3 + 1; a round of what one round has; the swaps before and after it.
    steps = max(verify(STRATEGIES["ring"].plan(3)).peak)
    assert verify(plan).peak == pytest.approx(3 * [4 + max(steps, 6) / 3 + 4 / 3])
    # With two ranks the first step has the most. The results of the round before are there too.
    two = STRATEGIES["usp"].plan(4, head_parallel_size=2, head_rounds=3)
    assert verify(two).peak == pytest.approx(2 * [4 + (max(verify(STRATEGIES["ring"].plan(2)).peak) + 1) / 3 + 4 / 3])


@pytest.mark.parametrize("name", ["ring", "mesh"])
def test_the_last_messages_of_a_round_travel_during_the_next(name):
    """A gradient takes 1, and a rank waits only for those of the last round."""
    plan = STRATEGIES[name].plan(8, backward=True, head_parallel_size=2, head_rounds=3)

    def time(transfer) -> float:
        return float(transfer.tensor in (T.DKV, T.DQ)) if transfer.share == 1 else 0.0

    def seconds(rounds: int) -> float:
        several = replace(plan, head_rounds=rounds)
        return trace(several, transfer_time=time, block_time=lambda block, plan: 4.0).finish

    blocks = trace(replace(plan, head_rounds=1), block_time=lambda block, plan: 4.0).finish
    assert seconds(1) > blocks
    assert seconds(3) - seconds(1) == pytest.approx(2 * blocks)


@pytest.mark.parametrize("backward", [False, True])
def test_rounds_of_tokens_hide_the_swaps_beside_them(backward):
    """The later half of the tokens has 3/4 of the pairs. A swap and a swap back are hidden."""
    plan = STRATEGIES["ulysses"].plan(2, layout="cyclic", token_rounds=2, backward=backward)
    comes = T.DO if backward else T.Q

    def time(transfer) -> float:
        return 3.0 if transfer.tensor is comes else 2.0 * (transfer.tensor in (T.O, T.DQ))

    assert trace(plan, transfer_time=time, block_time=lambda block, plan: 16.0).finish == 3 + 16 + 2
    whole = replace(plan, token_rounds=1)
    assert trace(whole, transfer_time=time, block_time=lambda block, plan: 16.0).finish == 3 + 16 + 2
    shape = Shape(12, 4, 4, 8, 2)
    assert verify(plan).volume == verify(whole).volume
    assert received_bytes(plan, 0, shape) == received_bytes(whole, 0, shape)
    assert chunk_bytes(plan, comes, shape, True) == chunk_bytes(whole, comes, shape, True) / 2


# -- placement and data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("placement", RANK_PLACEMENTS)
@pytest.mark.parametrize("hp,cp", [(1, 4), (4, 1), (2, 3), (3, 2), (4, 4)])
def test_a_head_group_owns_a_chunk_of_the_steps(layout, placement, hp, cp):
    n, length = hp * cp, hp * cp * 4
    plan = STRATEGIES["ring"].plan(n, layout=layout, head_parallel_size=hp, placement=placement)
    assert sorted(plan.chunk_of(r) for r in range(n)) == list(range(n))
    for r in range(n):
        group, context = plan.grid.along(r, "heads"), plan.grid.along(r, "context")
        assert (len(group), len(context)) == (hp, cp)
        near = group if placement == HEAD_FIRST else context
        assert near == tuple(range(near[0], near[0] + len(near)))
        place = plan.grid.coordinates(r)["context"]
        whole = positions(layout, place, cp, length)
        found = torch.full_like(whole, -1)
        for member in group:
            part = plan.chunk_of(member)
            mine = positions(layout, part, n, length)
            for own, where in rows_in(layout, part, place, cp, hp, length):
                found[where] = mine[own]
        assert torch.equal(found, whole)


def test_examples_of_placement():
    """Figure 11: head-first keeps ranks 0 and 1 in a head group, context-first ranks 0 to 3 in a context group."""
    first, second = (
        STRATEGIES["loongtrain"].plan(8, layout="contiguous", head_parallel_size=2, placement=p)
        for p in RANK_PLACEMENTS
    )
    assert first.grid.along(0, "heads") == (0, 1) and first.grid.along(0, "context") == (0, 2, 4, 6)
    assert second.grid.along(0, "heads") == (0, 4) and second.grid.along(0, "context") == (0, 1, 2, 3)
    assert Plan("own", "cyclic", Pairs.all(4), False, ((),) * 4, head_parallel_size=2).grid == first.grid  # the default
    assert [first.chunk_of(r) for r in range(8)] == list(range(8))
    assert [second.chunk_of(r) for r in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_communicators_of_a_rank():
    """Rank 1 of 4 computes the second half of the heads with rank 3; a plan names the ranks of its steps 0 and 1."""
    plan = STRATEGIES["allgather"].plan(4, head_parallel_size=2)
    everyone = (0, 1, 2, 3)
    assert plan.communicators(1) == sorted(
        [("gather", (1, 3)), ("heads", everyone), *((c, everyone) for c in plan.channels)]
    )


# -- exactness ------------------------------------------------------------------------------------------------

GRIDS = [(2, 1), (4, 1), (2, 2), (2, 3), (4, 2), (3, 4)]


def attend(cp, causal, *tensors, kernel=None):
    def run(q, k, v):
        return context_parallel_attention(q, k, v, cp, causal=causal, return_lse=True, kernel=kernel)

    return gradients(run, *tensors)


HEADS = [(12, 12), (12, 4), (12, 1), (4, 4), (8, 2), (6, 1)]


# Each grid meets every third number of heads; tests/campaigns/fuzz the product.
@pytest.mark.parametrize(
    "hp,cp,heads,kv_heads",
    [(*grid, *HEADS[i]) for g, grid in enumerate(GRIDS) for i in range((g + 1) % 3, len(HEADS), 3)],
)
def test_exact(hp, cp, heads, kv_heads):
    n = hp * cp
    if hp not in head_parallel_sizes(heads, kv_heads):
        with pytest.raises(UsageError, match=f"--cp-head-parallel-size {hp}: cannot split {heads} heads"):
            attend(AllRanks(n, "usp", head_parallel_size=hp), True, *problem(n, heads, kv_heads, torch.float32))
        return
    for i, name in enumerate(["ulysses"] if cp == 1 else INNER):
        for j, layout in enumerate(STRATEGIES[name].layouts):
            # Each grid and each number of heads meets both masks and both placements; tests/campaigns/fuzz the product.
            causal, placement = (i + j + hp + kv_heads) % 2 == 0, RANK_PLACEMENTS[(i + cp + heads // kv_heads) % 2]
            ranks = AllRanks(n, name, layout, head_parallel_size=hp, placement=placement)
            got = attend(ranks, causal, *problem(n, heads, kv_heads, torch.float32))
            for what, error in zip(WHAT, errors(got, exact(n, heads, kv_heads, torch.float32, causal)), strict=True):
                assert error < 2e-6, f"{name} {layout} {placement} {what}: {error:.1e}"


@pytest.mark.parametrize(
    "n,heads,kv_heads", [(1, 4, 4), (2, 8, 2), (4, 6, 1), (6, 4, 4), (6, 8, 2), (9, 6, 1), (12, 8, 2)]
)
def test_double_ring_is_exact(n, heads, kv_heads):
    for causal in (True, False):
        want = exact(n, heads, kv_heads, torch.float32, causal)
        for i, w in enumerate(divisors(n) if n < 12 else (3, 4) if n == 12 else (4,)):
            layout = LAYOUTS[(i + kv_heads + causal) % 3]
            ranks = AllRanks(n, "loongtrain", layout, inner_ring_size=w)
            got = attend(ranks, causal, *problem(n, heads, kv_heads, torch.float32))
            assert max(errors(got, want)) < 2e-6, (w, layout)


@pytest.mark.parametrize("placement", RANK_PLACEMENTS)
def test_replicated_heads_leave_no_error_in_float64(placement):
    ranks = AllRanks(8, "loongtrain", "zigzag", head_parallel_size=4, inner_ring_size=1, placement=placement)
    got = attend(ranks, True, *problem(8, 8, 2, torch.float64), kernel=Reference())
    assert max(errors(got, exact(8, 8, 2, torch.float64, True))) < 1e-14


ROUNDS = [(12, 12, 3), (12, 6, 6), (8, 2, 2), (8, 1, 4)]


@pytest.mark.parametrize(
    "name,heads,kv_heads,rounds",
    [(name, *ROUNDS[k % 4]) for k, name in enumerate(["ulysses", *INNER])],
)
def test_rounds_are_exact(name, heads, kv_heads, rounds):
    """Also where a key/value head is swapped in several rounds, and its gradients are summed over them."""
    tensors = problem(8, heads, kv_heads, torch.float64)
    n, size = (2, {}) if name == "ulysses" else (8, {"head_parallel_size": 2})
    for causal, layout in zip((True, False, True), STRATEGIES[name].layouts, strict=False):
        got = attend(AllRanks(n, name, layout, head_rounds=rounds, **size), causal, *tensors, kernel=Reference())
        assert max(errors(got, exact(8, heads, kv_heads, torch.float64, causal))) < 1e-14


@pytest.mark.parametrize("heads,kv_heads,sinks", [(4, 4, False), (8, 2, True), (4, 1, False)])
def test_rounds_of_tokens_are_exact(heads, kv_heads, sinks):
    """A causal mask computes the ranges of tokens in turn; a full one all of them at once."""
    tensors = problem(8, heads, kv_heads, torch.float64)
    for rounds in (3, 6):
        ranks = AllRanks(4, "ulysses", "cyclic", token_rounds=rounds)
        for causal in (True, False):
            got = attend(ranks, causal, *tensors, kernel=Reference())
            assert max(errors(got, exact(8, heads, kv_heads, torch.float64, causal))) < 1e-14
    if sinks:
        own = torch.linspace(-1, 1, heads, dtype=torch.float64)
        both = []
        for options in ({}, {"token_rounds": 3}):
            ranks, given = AllRanks(4, "ulysses", "cyclic", **options), own.clone().requires_grad_()
            q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
            out = context_parallel_attention(q, k, v, ranks, window=(5, 0), sinks=given, kernel=Reference())
            both.append(torch.autograd.grad(out, (q, k, v, given), tensors[3]))
        assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(*both, strict=True))


def test_rounds_of_tokens_divide_them():
    ranks = AllRanks(4, "ulysses", "cyclic", token_rounds=4)
    with pytest.raises(UsageError) as refusal:
        context_parallel_attention(*(torch.zeros(24, 1, 4, 8) for _ in range(3)), ranks)
    assert str(refusal.value) == "--cp-token-rounds 4: does not divide the 6 tokens of a rank; give 1, 2, 3, 6"


@pytest.mark.parametrize("n,rounds", [(8, 1), (2, 4)])
def test_gradients_of_one_head_are_summed_in_float32(n, rounds):
    """In bfloat16 eight replicas, or four rounds of replicas, lose no more than a ring does, which rounds once."""
    want, tensors = exact(8, 8, 1, torch.bfloat16, True), problem(8, 8, 1, torch.bfloat16)
    ranks = AllRanks(n, "ulysses", "contiguous", head_rounds=rounds), AllRanks(n, "ring", "contiguous")
    ulysses, ring = (errors(attend(of, True, *tensors), want) for of in ranks)
    assert all(ours < 1.05 * theirs + 1e-6 for ours, theirs in zip(ulysses, ring, strict=True)), (ulysses, ring)


@pytest.mark.parametrize("heads,kv_heads,rounds", [(6, 6, 1), (6, 3, 2), (12, 1, 1), (12, 12, 4), (12, 1, 2)])
def test_the_volume_counted_is_the_volume_moved(monkeypatch, heads, kv_heads, rounds):
    moved = Counter()
    buffers = []  # of messages, and their tensors
    exchange, all_to_all, messages = LocalTransport.exchange, LocalTransport.all_to_all, head_swap._messages

    def noted_messages(chunks):
        buffers.append(messages(chunks))
        return buffers[-1]

    def noted_exchange(self, channel, sends, receives):
        moved[self.rank] += sum(x.numel() for _, x in receives if x.shape[-1] == DIM and x.is_floating_point())
        return exchange(self, channel, sends, receives)

    def noted_all_to_all(self, channel, group, sent, received, at_once=False):
        assert buffers[-1][0] is received
        moved[self.rank] += sum(x.numel() for x in buffers[-1][1] if x.shape[-1] == DIM)
        return all_to_all(self, channel, group, sent, received, at_once)

    monkeypatch.setattr(head_swap, "_messages", noted_messages)
    monkeypatch.setattr(LocalTransport, "exchange", noted_exchange)
    monkeypatch.setattr(LocalTransport, "all_to_all", noted_all_to_all)
    n, causal = 6, True
    ranks = AllRanks(n, "loongtrain", "cyclic", head_parallel_size=3, inner_ring_size=2, head_rounds=rounds)
    tensors = problem(n, heads, kv_heads, torch.float32)
    attend(ranks, causal, *tensors)
    lengths = len(tensors[0]), len(tensors[1])
    plans = [ranks.plans.of(Mask(causal), lengths, heads, kv_heads, backward=backward) for backward in (False, True)]
    counted = sum(verify(plan, plan.kv_ratio(heads, kv_heads)).received for plan in plans)
    unit = tensors[0].numel() / n
    assert [moved[r] / unit for r in range(n)] == pytest.approx([counted] * n)


# -- between processes ----------------------------------------------------------------------------------------


def _on_rank(name: str, layout: str, heads: int, kv_heads: int, options: dict) -> tuple:
    cp = ContextParallel(name, layout, **options)
    results = []
    for causal in (True, False):
        q, k, v, dout = (cp.shard(x) for x in problem(4, heads, kv_heads, torch.float32))
        assert torch.equal(cp.positions(48), cp.shard(torch.arange(48)))
        results.append(
            gradients(lambda *x: context_parallel_attention(*x, cp, causal=causal, return_lse=True), q, k, v, dout)  # noqa: B023
        )
    return cp.chunk, results


@pytest.mark.parametrize(
    "name,options",
    [
        ("ulysses", {}),
        ("usp", {"head_parallel_size": 2, "head_rounds": 2}),
        ("ulysses", {"token_rounds": 3}),
        ("loongtrain", {"head_parallel_size": 2, "placement": "context-first"}),
        ("allgather", {"head_parallel_size": 2, "placement": "context-first"}),
        ("loongtrain", {"inner_ring_size": 2}),
    ],
)
def test_exact_between_processes(ranks, name, options):
    layouts = ["cyclic"] if "token_rounds" in options else STRATEGIES[name].layouts
    for i, (heads, kv_heads) in enumerate([(4, 4), (4, 1)]):
        for layout in layouts[i::2] or layouts:
            replies = sorted(ranks(4, _on_rank, name, layout, heads, kv_heads, options), key=lambda reply: reply[0])
            assert [chunk for chunk, _ in replies] == [0, 1, 2, 3]
            for mask, causal in enumerate((True, False)):
                of_ranks = [reply[mask] for _, reply in replies]
                got = [unshard(parts, layout) for parts in zip(*of_ranks, strict=True)]
                error = errors(got, exact(4, heads, kv_heads, torch.float32, causal))
                assert max(error) < 2e-6, (layout, heads, kv_heads, causal, error)


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,n,options,message",
    [
        ("usp", 4, {"head_parallel_size": 3},
         "--cp-head-parallel-size 3: does not divide 4 context ranks; give --cp-head-parallel-size 1 or 2 or 4"),
        ("ring", 4, {"head_parallel_size": 0},
         "--cp-head-parallel-size 0: does not divide 4 context ranks; give --cp-head-parallel-size 1 or 2 or 4"),
        ("ulysses", 4, {"head_parallel_size": 2},
         "--cp-head-parallel-size 2: ulysses splits the heads over all 4 context ranks; give 4, or usp"),
        ("usp", 4, {}, "--cp-strategy usp: needs --cp-head-parallel-size 2 or more; for 1, give ring"),
        ("usp", 4, {"head_parallel_size": 1, "head_rounds": 4, "heads": 4},
         "--cp-strategy usp: needs --cp-head-parallel-size 2 or more; for 1, give ring"),
        ("ring", 4, {"head_rounds": 2},
         "--cp-head-rounds 2: needs --cp-head-parallel-size 2 or more; for 1, give --cp-head-rounds 1"),
        ("ulysses", 4, {"head_rounds": 3, "heads": 16, "kv_heads": 8},
         "--cp-head-rounds 3: cannot split the 4 heads of a rank, of 16 with 8 key/value heads; "
         "give --cp-head-rounds 1 or 2 or 4"),
        ("usp", 4, {"placement": "node"}, "--cp-placement node: unknown; choose head-first or context-first"),
        ("ulysses", 4, {"token_rounds": 2},
         "--cp-token-rounds 2: does not work with --cp-layout contiguous; give cyclic"),
        ("ulysses", 4, {"token_rounds": 2, "layout": "cyclic", "head_rounds": 4},
         "--cp-token-rounds 2: does not work with --cp-head-rounds 4; leave one out"),
        ("usp", 4, {"head_parallel_size": 2, "token_rounds": 2},
         "--cp-token-rounds 2: not an option of usp; give --cp-strategy ulysses"),
        ("loongtrain", 8, {"inner_ring_size": 3},
         "--cp-inner-ring-size 3: does not divide 8 context ranks; give one of 1, 2, 4, 8"),
        ("loongtrain", 8, {"inner_ring_size": 8, "head_parallel_size": 2},
         "--cp-inner-ring-size 8: does not divide 4 context ranks; give one of 1, 2, 4"),
        ("loongtrain", 1, {"inner_ring_size": 2},
         "--cp-inner-ring-size 2: does not divide 1 context ranks; give one of 1"),
        ("usp", 4, {"head_parallel_size": 2, "inner_ring_size": 2},
         "--cp-inner-ring-size 2: not an option of usp; give --cp-strategy loongtrain"),
    ],
)  # fmt: skip
def test_wrong_options(name, n, options, message):
    with pytest.raises(UsageError) as refusal:
        STRATEGIES[name].plan(n, **options)
    assert str(refusal.value) == message


def test_sizes_that_split_the_heads():
    assert head_parallel_sizes(33, 33) == [1, 3, 11, 33]
    assert head_parallel_sizes(32, 8) == [1, 2, 4, 8, 16, 32]
    assert head_parallel_sizes(12, 4) == [1, 2, 4, 12]  # 3 and 6 neither divide the key/value heads nor replicate them
    assert head_parallel_sizes(6, 1) == [1, 2, 3, 6]
    for heads in range(1, 13):
        for kv_heads in divisors(heads):
            for size in head_parallel_sizes(heads, kv_heads):
                assert max(kv_heads, size) % math.lcm(size, kv_heads) == 0 and heads % max(kv_heads, size) == 0


@pytest.mark.parametrize(
    "name,n,hp,heads,kv_heads,message",
    [
        ("usp", 4, 2, 33, 33,
         "--cp-head-parallel-size 2: cannot split 33 heads with 33 key/value heads, as 1, 3, 11, 33 can; "
         "give --cp-strategy ring --cp-head-parallel-size 1"),
        ("loongtrain", 6, 6, 12, 4,
         "--cp-head-parallel-size 6: cannot split 12 heads with 4 key/value heads, as 1, 2, 4, 12 can; "
         "give --cp-head-parallel-size 2"),
        ("ulysses", 6, 6, 33, 33,
         "--cp-head-parallel-size 6: cannot split 33 heads with 33 key/value heads, as 1, 3, 11, 33 can; "
         "give --cp-strategy usp --cp-head-parallel-size 3"),
    ],
)  # fmt: skip
def test_heads_that_do_not_split(name, n, hp, heads, kv_heads, message):
    with pytest.raises(UsageError) as refusal:
        STRATEGIES[name].plan(n, head_parallel_size=hp, heads=heads, kv_heads=kv_heads)
    assert str(refusal.value) == message
    q, k = torch.zeros(n * 2, 1, heads, 4), torch.zeros(n * 2, 1, kv_heads, 4)
    with pytest.raises(UsageError) as refusal:
        context_parallel_attention(q, k, k, AllRanks(n, name, head_parallel_size=hp))
    assert str(refusal.value) == message
