"""Plans: what the verifier proves about those of our strategies, which plans it refuses, and their costs."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, UsageError
from megatron.context_parallel.attention import plans as plans_of_masks
from megatron.context_parallel.plan.ir import AllGather, Attend, Plan, PlanError, Recv, ReduceScatter, Send, Step, T
from megatron.context_parallel.plan.trace import trace
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.strategies import Pass
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from tests.campaigns.plan_mutations import run as run_changed
from tests.support.verdict import Subject
from tests.support.waiting import stuck

# The baselines here; every other strategy has a test file of its own, with its paper's formulas.
CASES = [(name, layout) for name in ("ring", "allgather") for layout in STRATEGIES[name].layouts]


def expected_volume(name: str, layout: str, causal: bool, backward: bool, n: int, r: int) -> Counter:
    """Units rank r receives, by the closed formulas of docs/strategies.md."""
    kv = dkv = 2 * (n - 1)
    if name == "ring" and layout == "contiguous" and causal:
        kv, dkv = 2 * r, 2 * max(0, r - 1) + (2 if r < n - 1 else 0)
    return +Counter({T.KV: kv, T.DKV: dkv if backward else 0})


@pytest.mark.parametrize("name,layout", CASES)
@pytest.mark.parametrize("causal", [True, False])
def test_every_plan_is_proved_and_counted(name, layout, causal):
    for n in [*range(1, 13), 16, 33]:
        for backward in (False, True) if n < 33 else (causal,):
            plan = STRATEGIES[name].plan(n, layout=layout, causal=causal, backward=backward)
            report = verify(plan)
            for r, volume in enumerate(report.volume):
                assert volume == expected_volume(name, layout, causal, backward, n, r), (n, r)
            idle = (n - 1) / (2 * n) if causal and layout == "contiguous" else 0
            assert report.idle == pytest.approx(idle, abs=1e-12)


@pytest.mark.parametrize("n", [2, 5, 64])
def test_ring_memory_does_not_grow(n):
    # Own Q, KV and O, the KV at work and the KV on its way.
    assert max(verify(STRATEGIES["ring"].plan(n)).peak) == (8 if n > 2 else 6)


def test_allgather_memory_grows():
    assert [max(verify(STRATEGIES["allgather"].plan(n)).peak) for n in (2, 5, 64)] == [6, 12, 130]


def test_grouped_query_attention_shrinks_keys_and_values():
    report = verify(STRATEGIES["ring"].plan(8, backward=True), kv_ratio=0.25)
    assert report.received == 0.25 * 4 * 7


def edit(plan: Plan, rank: int, step: int, change) -> Plan:
    steps = [list(s) for s in plan.steps]
    steps[rank][step] = change(steps[rank][step])
    return replace(plan, steps=tuple(tuple(s) for s in steps))


def without(kind) -> callable:
    return lambda step: Step(tuple(op for op in step.comm if not isinstance(op, kind)), step.attend)


def redirect(step: Step) -> Step:
    return Step(tuple(replace(op, peer=9) if isinstance(op, Send) else op for op in step.comm), step.attend)


def other_chunk(step: Step) -> Step:
    return Step(tuple(replace(op, chunk=0) if isinstance(op, Recv) else op for op in step.comm), step.attend)


BROKEN = {
    "dropped block": (
        "ring", False, 2, 1, lambda s: Step(s.comm, ()), r"rank 2, step 4: O chunk 2 ends without the block of chunk 1",
    ),
    "doubled block": (
        "ring", False, 1, 2, lambda s: Step(s.comm, s.attend * 2),
        r"rank 1, step 2: block \(query chunk 1, key chunk 3\) computed twice",
    ),
    "missing receive": (
        "ring", False, 3, 1, without(Recv), r"rank 3, step 2: Send of KV chunk 1, which the rank does not have",
    ),
    "missing send": (
        "ring", False, 0, 1, without(Send),
        r"rank 0, step 2: message KV chunk 2 on channel ring meets message KV chunk 3 of rank 1, step 1",
    ),
    "wrong chunk": (
        "ring", False, 3, 0, other_chunk, r"message KV chunk [02] on channel ring meets message KV chunk [02] of rank",
    ),
    "no such peer": ("ring", False, 3, 0, redirect, r"rank 3, step 0: Send of KV chunk 3 has peer 9; need"),
    "lost gradient": (
        "ring", True, 2, 4, without(Send), r"rank [23], step \d: .*DKV",
    ),
    "absent from a collective": (
        "allgather", False, 1, 0, without(AllGather), r"rank 1, step 1: block needs KV chunk 0, which the rank",
    ),
    "absent from the last collective": (
        "allgather", True, 1, 2, without(ReduceScatter), r"rank 0, step 3: waits forever for DKV chunk 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_plans_are_refused(what):
    name, backward, rank, step, change, message = BROKEN[what]
    plan = STRATEGIES[name].plan(4, layout="zigzag", backward=backward)
    verify(plan)
    with pytest.raises(PlanError, match=message):
        verify(edit(plan, rank, step, change))


def test_swapped_order_is_refused():
    def swap(plan: Plan, rank: int) -> Plan:
        steps = list(plan.steps[rank])
        steps[0], steps[1] = Step(steps[1].comm, steps[0].attend), Step(steps[0].comm, steps[1].attend)
        return replace(plan, steps=(*plan.steps[:rank], tuple(steps), *plan.steps[rank + 1 :]))

    with pytest.raises(PlanError, match=r"rank 2, step 0: Send of KV chunk 1, which the rank does not have"):
        verify(swap(STRATEGIES["ring"].plan(4), 2))


def test_circular_wait_is_refused():
    # Both ranks wait for the other's first message before they send their own.
    def rank(me: int) -> tuple[Step, ...]:
        other = 1 - me
        return (
            Step((Recv(T.KV, other, other),), (Attend((me,), (me,)),)),
            Step(attend=(Attend((me,), (other,)),)),
            Step((Send(T.KV, me, other),)),
        )

    with pytest.raises(PlanError, match=r"rank 0, step 1: waits forever for KV chunk 1, .*rank 1 at step 1"):
        verify(Plan("circle", "cyclic", Pairs.all(2), False, (rank(0), rank(1))))


def test_channels_keep_their_order():
    """A second batch of a channel does not overtake the first: that is what NCCL does, and here it hangs."""

    def rank(me: int, channel: str) -> tuple[Step, ...]:
        other = 1 - me
        late = Send(T.KV, me, other)
        early = Recv(T.KV, other, other, channel=channel)
        if me == 0:  # sends on the first channel only after it has used what comes on the second
            return (Step((early,), (Attend((0,), (0, 1)),)), Step((late,)))
        return (
            Step((Recv(T.KV, 0, 0),), (Attend((1,), (1,)),)),
            Step((Send(T.KV, 1, 0, channel=channel),), (Attend((1,), (0,)),)),
        )

    def plan(channel: str) -> Plan:
        steps = rank(0, channel), rank(1, channel)
        return Plan("channels", "cyclic", Pairs.all(2), False, steps, channels=("ring", "second"))

    verify(plan("second"))
    with pytest.raises(PlanError, match="waits forever"):
        verify(plan("ring"))


def test_unused_and_left_over_chunks_are_refused():
    unused = Plan(
        "unused",
        "contiguous",
        Pairs.all(2),
        False,
        tuple(
            (
                Step(
                    (
                        Send(T.KV, me, 1 - me),
                        Recv(T.KV, 1 - me, 1 - me),
                        Send(T.Q, me, 1 - me),
                        Recv(T.Q, 1 - me, 1 - me),
                    )
                ),
                Step(attend=(Attend((me,), (0, 1)),)),
            )
            for me in (0, 1)
        ),
    )
    with pytest.raises(PlanError, match="rank 0, step 0: Q chunk 1 is received but never used"):
        verify(unused)
    left = Plan("left", "cyclic", Pairs.all(1), False, ((Step(attend=(Attend((0,), (0,)),)),),))
    verify(left)
    helper = Plan(
        "helper",
        "contiguous",
        Pairs((0b01, 0b11)),
        False,
        (
            (Step((Recv(T.Q, 1, 1),), (Attend((0,), (0,)),)), Step(attend=(Attend((1,), (0,)),))),
            (Step((Send(T.Q, 1, 0),), (Attend((1,), (1,)),)),),
        ),
    )
    with pytest.raises(PlanError, match="rank 0, step 2: partial O chunk 1 is never sent"):
        verify(helper)


def hasty(sent: int) -> Plan:
    """Rank 0 sends `sent` chunks of keys to rank 3 on one channel, then its queries, which rank 3 wants first."""
    keys = [Step((Send(T.KV, chunk, 3, "keys"),)) for chunk in range(sent)]
    gathered = [Recv(T.KV, chunk, chunk, channel="in") for chunk in range(1, sent)]
    first = [Step(tuple(gathered), (Attend((0,), (0,)),)), *keys, Step((Send(T.Q, 0, 3, "queries"),))]
    first.append(Step((Recv(T.O, 0, 3, "queries"),), (Attend((0,), tuple(range(1, sent))),)))
    last = [Step((Recv(T.Q, 0, 0, channel="queries"),)), Step(attend=(Attend((0,), (3,)),))]
    last.append(Step((Send(T.O, 0, 0, "queries"),)))
    last += [Step((Recv(T.KV, chunk, 0, channel="keys"),)) for chunk in range(sent)]
    last.append(Step(attend=(Attend((3,), (*range(sent), 3)),)))
    steps = [first, [], [], last]
    for chunk in (1, 2):
        sends = (Send(T.KV, chunk, 0, "in"),) if chunk < sent else ()
        steps[chunk] = [Step(sends, (Attend((chunk,), (chunk,)),))]
    row = (1 << sent) - 1 | 0b1000
    visible_pairs, channels = Pairs((row, 0b0010, 0b0100, row)), ("in", "keys", "queries")
    return Plan("hasty", "cyclic", visible_pairs, False, tuple(map(tuple, steps)), channels)


def test_a_rank_waits_at_the_third_batch_of_a_channel():
    """The verifier, all ranks in one process, and a reader written from the executor agree."""
    subject = Subject("ring", 4, mask=Mask(False))
    verify(hasty(2))
    assert not stuck(hasty(2), one_queue=False) and stuck(hasty(2), one_queue=True)
    subject.computed(hasty(2))
    waits = r"rank 3, step 1: waits forever for Q chunk 0, .* rank 0 at step 3 for the oldest of the 2 batches"
    with pytest.raises(PlanError, match=waits):
        verify(hasty(3))
    assert stuck(hasty(3), one_queue=False)
    ends = r"rank 0 to send to rank 3 on channel keys; rank 3 to receive from rank 0 on channel queries"
    with pytest.raises(PlanError, match=ends):
        subject.computed(hasty(3))


def test_partials_under_way_on_two_channels_are_both_merged():
    def plan(keys: int) -> Plan:
        """Ranks 1 and 2 compute for rank 0, whose queries see the chunks `keys` (bits)."""
        asks = tuple(Send(T.Q, 0, helper, f"{helper}") for helper in (1, 2))
        answers = tuple(Recv(T.O, 0, helper, f"{helper}") for helper in (1, 2))
        helpers = [
            (
                Step((Recv(T.Q, 0, 0, f"{helper}"),)),
                Step(attend=(Attend((0,), (helper,)),)),
                Step((Send(T.O, 0, 0, f"{helper}"),)),
            )
            for helper in (1, 2)
        ]
        steps = ((Step(asks), Step(answers)), *helpers)
        return Plan("two", "cyclic", Pairs((keys, 0, 0)), False, steps, channels=("1", "2"))

    verify(plan(0b110))
    with pytest.raises(PlanError, match="rank 0, step 2: O chunk 0 ends without the block of chunk 0"):
        verify(plan(0b111))


class Counting(Pairs):
    """Pairs that count the queries about them."""

    asked = 0

    def __call__(self, q_chunk: int, kv_chunk: int) -> bool:
        Counting.asked += 1
        return super().__call__(q_chunk, kv_chunk)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_asks_the_mask_a_few_questions_a_chunk(name, layout):
    n, layouts = 64, STRATEGIES[name].layouts
    visible_pairs = Counting(Mask().pairs(*Chunks.pair(layout if layout in layouts else layouts[0], n, 4 * n)).rows)
    for how in [{}, {"inner_ring_size": 1}, {"inner_ring_size": n}] if name == "loongtrain" else [{}]:
        for backward in (False, True):
            Counting.asked = 0
            assert [*STRATEGIES[name].write(Pass(n // 2, n, visible_pairs, backward), **how)]
            assert Counting.asked <= 6 * n


def test_a_strategy_makes_and_verifies_each_plan_once(monkeypatch):
    made = []
    monkeypatch.setattr(plans_of_masks, "verify", lambda plan: made.append(plan))
    ranks = AllRanks(4, "ring", "zigzag")
    mask = Mask()
    for _ in range(2):
        plans = [ranks.plans.of(mask, (64, 64), 4, 2, backward=backward) for backward in (False, True)]
    assert made == plans and plans[0] is ranks.plans.of(Mask(), (128, 128), 4, 2, backward=False)


@pytest.mark.parametrize("spec,verified", [("ring", 2), ("ring+own", 3), ("own", 4)])
def test_plans_for_documents_are_verified_if_the_strategy_of_the_pass_is_a_users(spec, verified, monkeypatch):
    """Of two batches."""
    made = []
    monkeypatch.setattr(plans_of_masks, "verify", lambda plan: made.append(plan))
    ring = STRATEGIES["ring"]
    monkeypatch.setitem(STRATEGIES, "own", replace(ring, name="own", write=lambda at: ring.write(at)))
    ranks = AllRanks(4, spec, "zigzag")
    for length in (20, 30):
        mask = Mask(documents=Documents(torch.arange(64) // length))
        for backward in (False, True):
            ranks.plans.of(mask, (64, 64), 4, 2, backward=backward)
    assert len(made) == verified


def test_changed_plans_are_refused_or_right():
    """A sample; `python -m tests.campaigns.plan_mutations` tries more."""
    verdicts = run_changed(120, seed=2)
    assert verdicts["refused"] > 40 and verdicts["right"] > 10, verdicts


def test_causal_contiguous_blocks_are_not_computed_for_nothing():
    hp = {"usp": 2}
    for name in [name for name, strategy in STRATEGIES.items() if "contiguous" in strategy.layouts]:
        plan = STRATEGIES[name].plan(6, layout="contiguous", head_parallel_size=hp.get(name))
        for steps in plan.steps:
            for attend in (a for step in steps for a in step.attend):
                assert all(kv <= q for q in attend.q_chunks for kv in attend.kv_chunks)


def test_timeline_overlaps_communication_with_blocks():
    """A ring hides transfers that are shorter than a block, and waits for the rest of longer ones."""
    plan = STRATEGIES["ring"].plan(4)
    assert trace(plan).finish == 4
    assert trace(plan, transfer_time=lambda op: 0.9).finish == pytest.approx(4)
    assert trace(plan, transfer_time=lambda op: 1.5).finish == pytest.approx(3 * 1.5 + 1)


def test_options_are_those_the_strategy_has():
    with pytest.raises(UsageError, match=r"--cp-grid 2x2: not an option of ring; give .* attention2d or mesh"):
        STRATEGIES["ring"].plan(4, grid=(2, 2))
    with pytest.raises(UsageError, match="--cp-strategy ring: no option hops; it has none"):
        STRATEGIES["ring"].plan(4, hops=2)
