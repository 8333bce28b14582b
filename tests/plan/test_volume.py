"""What a plan costs, number by number: units and bytes received, and the memory of a rank."""

from dataclasses import replace

import pytest

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.plan.ir import (
    PARTIAL,
    AllGather,
    Attend,
    Plan,
    Recv,
    ReduceScatter,
    Send,
    Step,
    Steps,
    T,
    Transfer,
)
from megatron.context_parallel.plan.liveness import last_reads, peak
from megatron.context_parallel.plan.row_sets import MetRows, RowSets
from megatron.context_parallel.plan.schedule import schedule
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import Shape, chunk_bytes, received, received_bytes, units
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.slices import Slices

SHAPE = Shape(rows=3, heads=6, kv_heads=3, head_dim=5, itemsize=2, value_dim=7)


def test_units_of_each_tensor():
    assert {t: units(t, 0.5) for t in T} == {"Q": 1, "KV": 1, "O": 1, "QDO": 2, "DO": 1, "DQ": 1, "DKV": 1}
    assert units(T.KV) == units(T.DKV) == 2


def test_bytes_of_each_tensor():
    """3 rows: 90 numbers of queries, 126 of outputs, 108 of keys and values, 18 of a statistic."""
    plan = STRATEGIES["ring"].plan(4)
    numbers, statistics = 2, 4 * 18
    assert {t: chunk_bytes(plan, t, SHAPE, swap=False) for t in T} == {
        "Q": 90 * numbers,
        "KV": 108 * numbers,
        "O": 126 * 4 + statistics,
        "QDO": (90 + 126) * numbers + 2 * statistics,
        "DO": 126 * numbers + statistics,
        "DQ": 90 * 4,
        "DKV": 108 * 4,
    }
    narrow = STRATEGIES["ring"].plan(4, partials_in_16_bits=True)
    sent = {t: chunk_bytes(narrow, t, SHAPE, swap=False) for t in PARTIAL}
    assert sent == {"O": 126 * 2 + statistics, "DQ": 90 * 2, "DKV": 108 * 2}
    for t in T:
        held = chunk_bytes(narrow, t, SHAPE, swap=False, sent=False)
        assert held == chunk_bytes(plan, t, SHAPE, swap=False)
    square = replace(SHAPE, value_dim=None)
    assert chunk_bytes(plan, T.KV, square, swap=False) == 90 * numbers
    assert chunk_bytes(plan, T.DO, square, swap=False) == 90 * numbers + statistics


@pytest.mark.parametrize("parts,keys,gradients", [(2, 108, 2), (3, 108, 2), (6, 216, 4)])
def test_bytes_of_what_is_swapped(parts, keys, gradients):
    """In the model's dtype; with 6 parts the 3 key/value heads have replicas, and their gradients are partials."""
    plan = STRATEGIES["ring"].plan(6, head_parallel_size=parts)
    swapped = {T.Q: 180, T.DQ: 180, T.O: 252 + 72, T.DO: 252 + 72, T.KV: keys * 2, T.DKV: keys * gradients}
    assert {t: chunk_bytes(plan, t, SHAPE, swap=True) for t in swapped} == swapped
    assert chunk_bytes(plan, T.DKV, SHAPE, swap=False) == keys * 4


def test_what_a_rank_receives():
    """Two ranks a ring, two a head group: half of Q, KV and O is swapped, a chunk of KV comes in the ring."""
    plan = STRATEGIES["usp"].plan(4, layout="contiguous", head_parallel_size=2)
    for rank in range(4):
        last = plan.grid.coordinates(rank)["context"]  # the first chunk sees no other
        assert received(plan, rank, 0.5) == {T.Q: 0.5, T.KV: 0.5 + last, T.O: 0.5}
        assert received_bytes(plan, rank, SHAPE) == 90 + 108 + 162 + last * 216


def on_rank_0(*steps: Step, backward: bool = False) -> Plan:
    return Plan("own", "cyclic", Pairs.all(3), backward, (steps, (), ()), channels=("ring", "gather"))


def attend(*chunks: tuple) -> Step:
    return Step(attend=tuple(Attend((q,), (kv,)) for q, kv in chunks))


KEYS = tuple(Recv(T.KV, chunk, chunk) for chunk in (1, 2))
GATHER = AllGather(T.KV, (0, 1, 2), (0, 1, 2))
REDUCE = ReduceScatter(T.O, (0, 1, 2), (0, 1, 2))


def test_what_a_rank_of_a_collective_sends_and_receives():
    """(chunk, sender, receiver) of rank 1 of three: it gives what the others do not have."""
    gathered = [(t.chunk, t.sender, t.receiver) for t in GATHER.transfers(1)]
    reduced = [(t.chunk, t.sender, t.receiver) for t in REDUCE.transfers(1)]
    assert gathered == [(1, 1, 0), (1, 1, 2), (0, 0, 1), (2, 2, 1)]
    assert reduced == [(0, 1, 0), (2, 1, 2), (1, 0, 1), (1, 2, 1)]


def test_what_a_rank_reads_last():
    plan = on_rank_0(Step(KEYS, (Attend((0,), (0,)),)), attend((0, 1)), Step((Send(T.KV, 2, 1), Send(T.O, 0, 1))))
    assert last_reads(plan, 0) == {(T.Q, 0): 1, (T.KV, 0): 0, (T.KV, 1): 1, (T.KV, 2): 2, (T.O, 0): 2}
    assert last_reads(on_rank_0(attend((0, 1)), backward=True), 0) == {(T.QDO, 0): 0, (T.KV, 1): 0}


@pytest.mark.parametrize(
    "steps,backward,units",
    [
        ((), False, 3),  # own Q and KV
        ((attend((0, 0)),), False, 3 + 1),
        ((attend((0, 0)),), True, 4 + 3),  # own QDO and KV, partial DQ and DKV
        ((Step(KEYS), attend((0, 1)), attend((0, 2))), False, 3 + 4 + 1),  # both copies until the first is used
        ((Step(KEYS[:1]), attend((0, 1)), Step(KEYS[1:])), False, 3 + 2 + 1),  # one goes before the other comes
        ((Step(KEYS[:1]), Step(KEYS[1:]), Step()), False, 3 + 2),  # copies that nobody uses
        ((Step((GATHER,)), attend((0, 1), (0, 2))), False, 3 + 4 + 1),
        ((attend((1, 0)), Step((Send(T.O, 1, 1), Recv(T.O, 0, 1))), Step()), False, 3 + 1 + 1 + 1),
        ((attend((1, 0)), Step((Send(T.O, 1, 1),)), Step(KEYS)), False, 3 + 4),  # what is sent is gone
        ((attend((1, 0)), Step(), Step((Send(T.O, 1, 1), *KEYS))), False, 3 + 1 + 4),  # and not before
        ((Step((Recv(T.O, 0, 1),)), Step((Recv(T.O, 0, 2), *KEYS))), False, 3 + 1 + 1 + 4),
        ((attend((0, 0), (1, 0), (2, 0)), Step((REDUCE,)), Step()), False, 3 + 3 + 2 + 1),
        ((attend((0, 0)), attend((1, 0)), attend((0, 0)), Step(KEYS)), False, 3 + 2 + 4),  # partials stay
    ],
)
def test_most_that_is_alive(steps, backward, units):
    assert peak(on_rank_0(*steps, backward=backward), 0) == units


def test_what_is_reported_of_a_ring():
    """Contiguous and causal: rank r gets the keys of r others, two at a time, and has r + 1 of 4 blocks to compute."""
    report = verify(STRATEGIES["ring"].plan(4, layout="contiguous"))
    assert report.volume == ({}, {T.KV: 2}, {T.KV: 4}, {T.KV: 6}) and report.received == 6
    assert (report.steps, report.idle, report.peak) == (4, 6 / 16, (4, 6, 8, 8))


def test_copies_of_a_swap_are_alive_with_what_they_are_made_of():
    ulysses = STRATEGIES["ulysses"]
    assert verify(ulysses.plan(4, backward=True)).peak == (4 + 3 + 3,)
    assert verify(ulysses.plan(4), kv_ratio=0.25).peak == (1.5 + 1 + 1,)
    assert verify(ulysses.plan(4), kv_ratio=1.0).peak == (3 + 3,)


def test_gathered_keys_are_kept_while_the_next_block_uses_them():
    two, three = (Attend((0,), (0, 1)), Attend((1,), (0, 1))), Attend((0,), (0, 1, 2))
    leaves, others = Step((Send(T.DKV, 1, 1),)), Step((Send(T.DKV, 2, 1), Recv(T.KV, 2, 1)))
    steps = Step(attend=two), others, Step(attend=two[:1]), leaves, Step(attend=two[1:]), Step(attend=(three,))
    blocks = [block for step in schedule(on_rank_0(*steps, backward=True), 0) for block in step.blocks]
    assert [block.last for block in blocks] == [False, False, True, True, True]
    plan = STRATEGIES["attention2d"].plan(64)  # a rank gathers the keys of its column once
    assert sum(b.last for step in schedule(plan, 5) for b in step.blocks if len(b.attend.kv_chunks) > 1) == 1


def test_received_copies_are_freed_after_their_last_read():
    for name in ("ring", "mesh", "attention2d"):
        plan = STRATEGIES[name].plan(4, backward=True)
        for rank in range(4):
            found = {key: s for s, step in enumerate(schedule(plan, rank)) for key in step.freed}
            last = last_reads(plan, rank)
            assert found == {key: last[key] for key in last if key[0] not in PARTIAL and key[1] != rank} and found
            assert schedule(plan, rank) is schedule(plan, rank)


def test_rows_of_a_chunk_that_visits_more_ranks_than_python_nests_calls():
    """The last rank sees the last 2 of 4 keys of the first; all ranks between pass these on."""
    n = 1200

    def write(rank: int) -> tuple[Step, ...]:
        comes = (Recv(T.KV, 0, rank - 1),) if rank else ()
        goes = (Send(T.KV, 0, rank + 1),) if rank < n - 1 else ()
        return (Step((*comes, *goes), () if goes else (Attend((rank,), (0,)),)),)

    plan = Plan("chain", "contiguous", Pairs((*[1 << q for q in range(n - 1)], 1 | 1 << n - 1)), False, Steps(n, write))
    chunks = Slices.of(Chunks.of("contiguous", n, 4 * n))
    sets = RowSets(plan, MetRows(Mask(True, (4 * n - 6, 0)), chunks, chunks))
    assert [sets.rows(rank, T.KV, 0).tolist() for rank in (0, 1, n - 1)] == [[[0, 4]], [[2, 4]], [[2, 4]]]
    passed, used, returned = Transfer(T.KV, 0, 0, 1), Transfer(T.KV, 0, n - 2, n - 1), Transfer(T.DKV, 0, n - 1, 0)
    assert [sets.share(t) for t in (passed, used)] == [0.5, 0.5]
    assert [sets.least_share(t) for t in (passed, used, returned)] == [0.0, 0.5, 0.5]  # of the ends alone
