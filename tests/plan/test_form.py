"""Plans without form: each is refused by one line that names rank and step."""

from dataclasses import replace

import pytest

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.plan.ir import AllGather, Attend, PlanError, Recv, ReduceScatter, Send, Step, T
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.tokens.chunk_pairs import Pairs

MALFORMED = {
    "numbers for chunks": (Step(attend=(Attend(0, 0),)), r"query chunks 0 of a block; need a tuple of distinct chunks"),
    "no chunks": (Step(attend=(Attend((0,), ()),)), r"key/value chunks \(\) of a block"),
    "a chunk there is not": (Step(attend=(Attend((0,), (0, 4)),)), r"key/value chunks \(0, 4\) of a block; .* below 4"),
    "a chunk twice": (Step(attend=(Attend((0, 0), (0,)),)), r"query chunks \(0, 0\) of a block"),
    "heads in disorder": (Step(attend=(Attend((0,), (0,), (0.5, 0.5)),)), r"heads \(0.5, 0.5\) of a block; need two"),
    "heads that are one number": (Step(attend=(Attend((0,), (0,), 0.5),)), r"heads 0.5 of a block; need two"),
    "heads that are three": (Step(attend=(Attend((0,), (0,), (0, 0.5, 1)),)), r"heads \(0, 0.5, 1\) of a block; need"),
    "heads that are texts": (Step(attend=(Attend((0,), (0,), ("0", "1")),)), r"heads \('0', '1'\) of a block; need"),
    "a list of heads": (Step(attend=(Attend((0,), (0,), [0, 1]),)), r"heads \[0, 1\] of a block; need two"),
    "chunk out of range": (Step((Send(T.KV, 4, 1),)), r"Send of KV chunk 4; need a chunk below 4"),
    "itself for a peer": (Step((Send(T.KV, 0, 0),)), r"Send of KV chunk 0 has peer 0"),
    "a tensor of the other pass": (
        Step((Send(T.DQ, 0, 1),)), r"Send of T.DQ, which is not sent in this pass; need T.KV, T.O, T.Q$",
    ),
    "a string for a tensor": (Step((Send("KV", 0, 1),)), r"Send of 'KV', which is not sent in this pass; need T.KV, "),
    "an undeclared channel": (
        Step((Send(T.KV, 0, 1, "x"),)),
        r"Send of KV chunk 0 on channel 'x', which is not one of \('ring',\); declare it",
    ),
    "a receive on one": (Step((Recv(T.KV, 1, 1, "x"),)), r"Recv of KV chunk 1 on channel 'x', which is not one of"),
    "a reduction on one": (
        Step((ReduceScatter(T.O, (0, 1), (0, 1)),)),
        r"ReduceScatter of O chunks \(0, 1\) on channel 'gather', which is not one of \('ring',\); declare it",
    ),
    "no channel": (Step((Send(T.KV, 0, 1, ""),)), r"Send of KV on channel ''; need a name"),
    "a partial sent twice": (Step((Send(T.O, 1, 1), Send(T.O, 1, 2))), r"O chunk 1 is sent 2 times"),
    "a partial reduced and sent": (
        Step((ReduceScatter(T.O, (0, 1), (0, 1)), Send(T.O, 1, 2))), r"O chunk 1 is sent 2 times",
    ),
    "outside a group": (Step((AllGather(T.KV, (1, 2), (1, 2)),)), r"over ranks \(1, 2\): rank 0 is not one of them"),
    "a group in disorder": (Step((AllGather(T.KV, (1, 0), (1, 0)),)), r"over ranks \(1, 0\): .* in ascending order"),
    "a group of one": (Step((AllGather(T.KV, (0,), (0,)),)), r"over ranks \(0,\): need a tuple of two or more"),
    "a chunk for two ranks": (Step((AllGather(T.KV, (0, 1), (0, 0)),)), r"chunks \(0, 0\); need"),
    "keys reduce-scattered": (Step((ReduceScatter(T.KV, (0, 1), (0, 1)),)), r"partials are reduce-scattered"),
    "no tuple": (Step([Send(T.KV, 0, 1)]), r"is not a Step with a tuple of operations"),
    "no operation": (Step((Attend((0,), (0,)),)), r"Attend\(.*\) is not an operation"),
    "no step": (None, r"None is not a Step"),
    "no tuple of blocks": (Step((), [Attend((0,), (0,))]), r"is not a Step with a tuple of operations and a tuple"),
    "no block": (Step(attend=(Send(T.KV, 0, 1),)), r"Send\(.*\) is not a block$"),
    "a chunk that is no number": (Step((Send(T.KV, True, 1),)), r"Send of KV chunk True; need a chunk below 4"),
    "a chunk below 0": (Step((Recv(T.KV, -1, 1),)), r"Recv of KV chunk -1; need a chunk below 4"),
    "a peer below 0": (Step((Recv(T.KV, 1, -1),)), r"Recv of KV chunk 1 has peer -1; need another rank below 4"),
    "a peer beyond": (Step((Recv(T.KV, 1, 4),)), r"Recv of KV chunk 1 has peer 4; need another rank below 4"),
    "a channel that is no name": (Step((Send(T.KV, 0, 1, None),)), r"Send of KV on channel None; need a name"),
    "a list of chunks": (Step(attend=(Attend((0,), [0]),)), r"key/value chunks \[0\] of a block"),
    "a partial gathered": (Step((AllGather(T.O, (0, 1), (0, 1)),)), r"AllGather of O .*: partials are reduce-"),
    "a rank twice": (Step((AllGather(T.KV, (0, 0, 1), (0, 1, 2)),)), r"over ranks \(0, 0, 1\): need a tuple of two or"),
    "a rank beyond": (Step((AllGather(T.KV, (0, 4), (0, 1)),)), r"over ranks \(0, 4\): need a tuple .* below 4 in asc"),
    "too few chunks": (Step((AllGather(T.KV, (0, 1), (0,)),)), r"chunks \(0,\); need a tuple of as many distinct"),
    "a chunk beyond": (Step((AllGather(T.KV, (0, 1), (0, 4)),)), r"chunks \(0, 4\); need .* each below 4"),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_steps_are_named(what):
    step, message = MALFORMED[what]
    plan = STRATEGIES["ring"].plan(4, layout="zigzag")
    plan = replace(plan, steps=((plan.steps[0][0], step, *plan.steps[0][1:]), *plan.steps[1:]))
    with pytest.raises(PlanError, match=rf"rank 0, step 1: .*{message}") as error:
        verify(plan)
    assert "\n" not in str(error.value)


def test_ranks_without_steps_and_plans_without_blocks():
    plan = STRATEGIES["ring"].plan(2)
    for steps, message in [
        ((plan.steps[0], ()), r"rank 0, step 0: message KV chunk 0 has no counterpart|rank 0, step 1: waits forever"),
        (((), ()), r"rank 0, step 0: O chunk 0 ends without the block of chunk 0"),
        ((), r"ring: steps of 0 ranks for a mask of 2 chunks; need one rank per chunk"),
        (plan.steps[:1], r"steps of 1 ranks for a mask of 2 chunks"),
        (([],), r"steps of 1 ranks for a mask of 2 chunks"),
        (([], ()), r"rank 0: steps \[\] are not a tuple"),
    ]:
        with pytest.raises(PlanError, match=message):
            verify(replace(plan, steps=steps))
    for row in (0b111, 0b100, -1):
        with pytest.raises(PlanError, match=rf"ring: query chunk 1 sees chunks {row:#b}; need bits of 2 chunks$"):
            verify(replace(plan, visible_pairs=Pairs((0b01, row))))
    nothing = verify(STRATEGIES["ring"].plan(2, visible_pairs=Pairs((0, 0))))  # padding alone: right, and nothing to do
    assert nothing.steps == 0 and nothing.idle == 0 and nothing.peak == (3, 3)
