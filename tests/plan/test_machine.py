"""The symbolic machine: the times of everything in a small plan, and the errors of plans that cannot be right."""

import pytest

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.plan.ir import AllGather, Attend, Plan, PlanError, Recv, ReduceScatter, Send, Step, T
from megatron.context_parallel.plan.trace import Clock, _Alone, trace
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.chunk_pairs import Pairs


def plan(*steps: tuple[Step, ...], channels: tuple[str, ...] = ("ring", "gather"), backward: bool = False) -> Plan:
    """A plan of as many ranks, each of which sees all."""
    return Plan("own", "cyclic", Pairs.all(len(steps)), backward, steps, channels)


def attend(*chunks: tuple) -> Step:
    return Step(attend=tuple(Attend((q,), (kv,)) for q, kv in chunks))


def times(plan: Plan, transfer_time: float = 2.0) -> list[tuple]:
    """(rank, step, channel, start, end) of all spans, in order."""
    spans = trace(plan, transfer_time=lambda transfer: transfer_time * transfer.share).spans
    return sorted((s.rank, s.step, s.channel, s.start, s.end) for s in spans)


# -- when -----------------------------------------------------------------------------------------------------


def test_a_block_waits_for_its_keys():
    def rank(me: int) -> tuple[Step, ...]:
        other = 1 - me
        return Step((Send(T.KV, me, other), Recv(T.KV, other, other)), (Attend((me,), (me,)),)), attend((me, other))

    both = plan(rank(0), rank(1))
    assert times(both, 2.5) == [
        span for r in (0, 1) for span in [(r, 0, "", 0, 1), (r, 0, "ring", 0, 2.5), (r, 1, "", 2.5, 3.5)]
    ]
    assert times(both, 0.5)[2] == (0, 1, "", 1, 2) and trace(both).finish == 2
    assert trace(both, block_time=lambda attend, of: 3 * (of is both)).finish == 6


def test_a_block_takes_the_time_of_the_pairs_that_the_mask_leaves():
    visible_pairs, block = Pairs((0b001, 0b101, 0)), Attend((0, 1, 2), (0, 2))
    assert [*block.pairs(visible_pairs)] == [(0, 0), (1, 0), (1, 2)]
    gather = Step((AllGather(T.KV, (0, 2), (0, 2)), AllGather(T.Q, (0, 1, 2), (0, 1, 2))))
    steps = (gather, Step(attend=(block,))), (Step(gather.comm[1:]),), (gather,)
    run = trace(Plan("own", "cyclic", visible_pairs, False, steps))
    assert run.finish == 3 and run.held[0][T.O, 1] == 0b101


def test_a_part_of_the_heads_takes_its_share_of_the_time():
    parts = tuple(Attend((0,), (0,), heads) for heads in ((0, 0.25), (0.25, 1)))
    run = trace(plan((Step(attend=parts),), (Step(),)))
    assert [(span.start, span.end) for span in run.spans] == [(0, 0.25), (0.25, 1)] and run.held[0][T.O, 0] == 1


def test_a_message_begins_with_its_last_end_and_behind_the_one_before_it():
    sender = Step((Send(T.KV, 0, 1),)), Step((Send(T.Q, 0, 1),)), attend((0, 0))
    receiver = attend((1, 1)), Step((Recv(T.KV, 0, 0),)), Step((Recv(T.Q, 0, 0),)), attend((1, 0))
    assert times(plan(sender, receiver)) == [
        (0, 0, "ring", 1, 3), (0, 1, "ring", 3, 5), (0, 2, "", 0, 1),
        (1, 0, "", 0, 1), (1, 1, "ring", 1, 3), (1, 2, "ring", 3, 5), (1, 3, "", 3, 4),
    ]  # fmt: skip


def test_messages_of_a_direction_share_its_line():
    out = Step((Send(T.KV, 0, 1), Send(T.KV, 0, 2), Recv(T.KV, 1, 1))), Step()
    one = (Step((Recv(T.KV, 0, 0), Send(T.KV, 1, 0))),)
    assert times(plan(out, one, (Step((Recv(T.KV, 0, 0),)),))) == [
        (0, 0, "ring", 0, 4), (1, 0, "ring", 0, 4), (2, 0, "ring", 0, 4),
    ]  # fmt: skip


def test_channels_overlap_and_the_third_batch_of_one_waits():
    first, *others = (T.KV, 0), (T.QDO, 0), (T.DQ, 0)
    sends = [Step((Send(*first, 1), Send(T.DKV, 0, 1, "gather"))), *(Step((Send(*key, 1),)) for key in others)]
    sends[2] = Step(sends[2].comm, (Attend((0,), (0,)),))
    takes = [Step((Recv(*first, 0), Recv(T.DKV, 0, 0, "gather"))), attend((1, 0))]
    takes += [Step((Recv(*key, 0),)) for key in others]
    assert times(plan(tuple(sends), tuple(takes), backward=True)) == [
        (0, 0, "gather", 0, 2), (0, 0, "ring", 0, 2), (0, 1, "ring", 3, 5), (0, 2, "", 2, 3), (0, 2, "ring", 5, 7),
        (1, 0, "gather", 0, 2), (1, 0, "ring", 0, 2), (1, 1, "", 2, 3), (1, 2, "ring", 3, 5), (1, 3, "ring", 5, 7),
    ]  # fmt: skip


def test_collectives_take_what_they_move():
    """Of three ranks, each sends and receives two chunks; the last comes late."""
    gather, reduce = AllGather(T.KV, (0, 1, 2), (0, 1, 2)), ReduceScatter(T.DKV, (0, 1, 2), (0, 1, 2))
    early = Step((gather,)), Step((reduce,))
    late = attend((2, 2)), *early
    got = times(plan(early, early, late, backward=True))
    assert got == [
        (0, 0, "gather", 1, 5), (0, 1, "gather", 5, 9), (1, 0, "gather", 1, 5), (1, 1, "gather", 5, 9),
        (2, 0, "", 0, 1), (2, 1, "gather", 1, 5), (2, 2, "gather", 5, 9),
    ]  # fmt: skip


def test_swaps_before_and_after():
    spans = times(STRATEGIES["ulysses"].plan(4))
    assert spans == [(0, 0, "", 3, 4), (0, 0, "heads", 0, 3), (0, 1, "heads", 4, 5.5)]


# -- what cannot be right -------------------------------------------------------------------------------------

KV0, KV1 = (T.KV, 0), (T.KV, 1)
HELPED = (  # rank 1 computes for rank 0, which computes the same block
    (Step((Send(T.Q, 0, 1), Recv(*KV1, 1)), (Attend((0,), (0,)),)), attend((0, 1)), Step((Recv(T.O, 0, 1),))),
    (Step((Recv(T.Q, 0, 0), Send(*KV1, 0))), attend((0, 1)), Step((Send(T.O, 0, 0),))),
)
GIVEN = (T.QDO, 0), KV0
REDUCED = attend((0, 0)), Step((ReduceScatter(T.DQ, (0, 1), (0, 1)),))  # by both
HALF, OTHER = (Attend((0,), (0,), heads) for heads in ((0, 0.5), (0.5, 1)))
WRONG = {
    "a part of the heads twice": (
        (Step(attend=(HALF, HALF)),),
        (Step(),),
        r"rank 0, step 0: block of query chunks \(0,\) and key chunks \(0,\) from 0 of the heads, after 0.5 of them",
    ),
    "a part of the heads sent": (
        (Step(attend=(HALF,)), Step((Send(T.O, 0, 1),), (OTHER,))),
        (Step((Recv(T.O, 0, 0),)),),
        "rank 0, step 1: O chunk 0 is sent with a part of the heads of a block",
    ),
    "a part of the heads left": (
        (Step(attend=(HALF,)),),
        (Step(),),
        r"rank 0, step 1: block of query chunks \(0,\) and key chunks \(0,\) ends with 0.5 of the heads; compute .*",
    ),
    "received twice": (
        (Step((Recv(*KV1, 1), Recv(*KV1, 1))), attend((0, 1))),
        (Step((Send(*KV1, 0), Send(*KV1, 0))),),
        "rank 0, step 1: KV chunk 1 received, but the rank already has it",
    ),
    "one's own received": (
        (Step((Recv(*KV0, 1),)), attend((0, 0))),
        (Step((Recv(*KV0, 0), Send(*KV0, 0))),),
        "rank 1, step 0: Send of KV chunk 0, which the rank does not have",
    ),
    "computed by both": (*HELPED, "rank 0, step 3: O chunk 0 received with blocks that it already contains"),
    "chunks of a collective": (
        (Step((ReduceScatter(T.O, (0, 1), (0, 1)),)),),
        (Step((ReduceScatter(T.O, (0, 1), (1, 0)),)),),
        r"rank 1, step 0: ReduceScatter O chunks \(1, 0\) on channel gather meets "
        r"ReduceScatter O chunks \(0, 1\) of rank 0, step 0",
    ),
    "another collective": (
        (Step(), Step((AllGather(T.KV, (0, 1), (0, 1)),))),
        (Step((AllGather(T.Q, (0, 1), (0, 1)),)),),
        r"rank 1, step 0: AllGather Q chunks \(0, 1\) on channel gather meets "
        r"AllGather KV chunks \(0, 1\) of rank 0, step 1",
    ),
    "another message": (
        (Step((Send(T.KV, 0, 1),)),),
        (Step(), Step((Recv(T.Q, 0, 0),))),
        "rank 1, step 1: message Q chunk 0 on channel ring meets message KV chunk 0 of rank 0, step 0",
    ),
    "no receive": (
        (Step(), Step((Send(T.KV, 0, 1),))), (), "rank 0, step 1: message KV chunk 0 has no counterpart",
    ),
    "no other": (
        (Step((AllGather(T.KV, (0, 1), (0, 1)),)), attend((0, 1))), (),
        "rank 0, step 1: waits forever for KV chunk 1, launched in step 0 on channel gather; also waiting: none",
    ),
    "not there at the end": (
        (Step((Recv(T.O, 0, 1),)),), (),
        "rank 0, step 1: waits forever for O chunk 0, launched in step 0 on channel ring; also waiting: none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_right_is_named(what):
    first, second, message = WRONG[what]
    with pytest.raises(PlanError, match=f"^({message})$"):
        trace(plan(first, second))


def test_a_block_reduced_twice():
    with pytest.raises(PlanError, match=r"^rank 0, step 3: DQ chunk 0 reduced with blocks counted twice$"):
        trace(
            plan(
                (Step(tuple(Send(*key, 1) for key in GIVEN)), *REDUCED),
                (Step(tuple(Recv(*key, 0) for key in GIVEN)), *REDUCED),
                backward=True,
            )
        )


@pytest.mark.parametrize(("spec", "period"), [("mesh:grid=2x4", 4), ("allgather", 1), ("ring", 2)])
def test_ranks_that_stand_for_others_hold_what_they_would(spec, period):
    for backward in (False, True):
        pass_ = parse_spec(spec).plan(8, backward=backward)
        clock = Clock(pass_, _Alone(pass_, lambda block, plan: 1.0, None), period=period)
        clock.run()
        assert clock.machines[0].held == trace(pass_).held[:period]


def test_a_deadlock_names_first_who_has_waited_longest():
    """Rank 1 waits for what it launched in its first step, rank 0 for its second."""
    circle = (
        (attend((0, 0)), Step((Recv(T.KV, 1, 1),)), attend((0, 1)), Step((Send(T.KV, 0, 1),))),
        (Step((Recv(T.KV, 0, 0),)), attend((1, 0)), Step((Send(T.KV, 1, 0),))),
    )
    with pytest.raises(PlanError) as refused:
        trace(plan(*circle))
    assert str(refused.value) == (
        "rank 1, step 1: waits forever for KV chunk 0, launched in step 0 on channel ring; "
        "also waiting: rank 0 at step 2 for KV chunk 1"
    )
