"""Mesh-Attention: tiles, greedy schedules, volumes and exactness."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.plan.ir import Recv, Send, T
from megatron.context_parallel.plan.trace import trace
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import received
from megatron.context_parallel.strategies.mesh import best_grid
from megatron.context_parallel.strategies.mesh_schedule import costs_by_bytes, greedy_steps
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import shard, unshard
from tests.support.exact import HEADS, WHAT, errors, exact, gradients, problem
from tests.support.sizes import SIZES

MESH, RING = STRATEGIES["mesh"], STRATEGIES["ring"]
# A block hides one unit; the backward query side counted with O, as in the paper.
BY_SIZE = {False: {T.Q: 1, T.KV: 2, T.O: 1}, True: {T.QDO: 3, T.KV: 2, T.DQ: 1, T.DKV: 2}}
LONG = {False: {T.Q: 3, T.KV: 6, T.O: 3}, True: {T.QDO: 9, T.KV: 6, T.DQ: 3, T.DKV: 6}}
UNEVEN = {False: {T.Q: 5, T.KV: 0.3, T.O: 1.5}, True: {T.QDO: 0.2, T.KV: 4, T.DQ: 2.5, T.DKV: 0.1}}
EVERY_COST = (1, 4, 0.3, 2.5)  # of queries


def grids(n: int) -> list[tuple[int, int]]:
    return [(a, n // a) for a in range(1, n + 1) if n % a == 0]


def local(a: int, b: int, backward: bool, costs=BY_SIZE):
    return greedy_steps(a, b, backward, tuple(costs[backward].items()))


def expected_volume(a: int, b: int, backward: bool, kv_ratio=1) -> Counter:
    q, kv = a - 1, 2 * kv_ratio * (b - 1)
    return +Counter({T.QDO: 2 * q, T.KV: kv, T.DQ: q, T.DKV: kv} if backward else {T.Q: q, T.KV: kv, T.O: q})


def pairs(plan) -> list[set[tuple[int, int]]]:
    computed = []
    for steps in plan.steps:
        computed.append({(x.q_chunks[0], x.kv_chunks[0]) for step in steps for x in step.attend})
    return computed


# -- plans -----------------------------------------------------------------------------------------------------------


def prove(n, grid, layout, causal, backward, **options):
    report = verify(MESH.plan(n, grid=grid, layout=layout, causal=causal, backward=backward, **options))
    assert set(map(tuple, (sorted(v.items()) for v in report.volume))) == {
        tuple(sorted(expected_volume(*grid, backward).items()))
    }
    assert report.idle == pytest.approx(0, abs=1e-12)
    a, b = grid
    # All chunks of the tile and their partials may be alive at once, and one partial more while it arrives.
    bound = 3 * a + 4 * b + (a > 1) + 2 * (b > 1) if backward else 2 * a + 2 * b + (a > 1)
    assert max(report.peak) <= bound


@pytest.mark.parametrize("layout", MESH.layouts)
@pytest.mark.parametrize("causal", [True, False])
def test_every_grid_is_proved(layout, causal):
    for n in [*range(1, 13), 16]:
        for i, grid in enumerate(grids(n)):
            for backward in (False, True):
                for q_transfer_blocks in EVERY_COST[i % 2 :: 2] if n < 9 else EVERY_COST[(i + causal) % 4 :: 4]:
                    prove(n, grid, layout, causal, backward, q_transfer_blocks=q_transfer_blocks)


@pytest.mark.parametrize("n", [33, 36])
def test_large_grids_are_proved(n):
    for i, grid in enumerate(grids(n)):
        prove(n, grid, MESH.layouts[i % 2], i % 3 > 0, i // 2 % 2 > 0, q_transfer_blocks=EVERY_COST[i % 4])


def test_volume_is_that_of_table_2_for_every_grid_to_64():
    """(2a/n + 2/a - 4/n) N d forward, in units of N d / n. The paper's backward, with O, is 4(a-1) + 4(b-1)."""
    for n in SIZES:
        for a, b in grids(n):
            units = []
            for backward in (False, True):
                plan = MESH.plan(n, visible_pairs=Pairs.all(n), backward=backward, grid=(a, b))
                for r in {0, n // 2, n - 1}:  # all ranks where plans are verified
                    by_tensor = received(plan, r)
                    assert +by_tensor == expected_volume(a, b, backward), (n, a, backward)
                units.append(by_tensor.total())
            assert units[0] == n * (Fraction(2 * a, n) + Fraction(2, a) - Fraction(4, n))
            assert units[1] == 4 * (a - 1) + 4 * (b - 1) - (a - 1)


def test_grouped_query_attention_shrinks_keys_and_values():
    report = verify(MESH.plan(12, grid=(3, 4), backward=True), kv_ratio=0.25)
    assert report.volume[5] == expected_volume(3, 4, True, kv_ratio=0.25)


def test_nine_ranks_move_72_units_and_ring_144():
    """The example of Figure 1: 6 units of inputs and 2 of outputs on each of 9 GPUs, against 16."""
    mesh, ring = verify(MESH.plan(9, grid=(3, 3))), verify(RING.plan(9))
    assert [v.total() for v in mesh.volume] == [8] * 9
    assert sum(v.total() for v in mesh.volume) == 72
    assert sum(v.total() for v in ring.volume) == 144


def test_nine_ranks_own_the_tiles_of_figure_1c():
    """Tiles row by row; the key chunks of a column of tiles are the numbers of the GPUs in it."""
    for r, mine in enumerate(pairs(MESH.plan(9, grid=(3, 3)))):
        down, across = divmod(r, 3)
        assert mine == {(3 * down + i, across + 3 * j) for i in range(3) for j in range(3)}
        assert (r, r) in mine


def test_fifteen_ranks_follow_table_1():
    """Figure 4's GPU 4 of a = 3, b = 5: query chunks 4, 5, 3 from rank 5, key chunks 4, 7, 10, 13, 1 from rank 7."""
    plan = MESH.plan(15, grid=(3, 5))
    got = [op for step in plan.steps[4] for op in step.comm if isinstance(op, Recv)]
    assert [(op.chunk, op.peer) for op in got if op.tensor is T.Q] == [(5, 5), (3, 5)]
    assert [(op.chunk, op.peer) for op in got if op.tensor is T.KV] == [(7, 7), (10, 7), (13, 7), (1, 7)]
    assert [(op.chunk, op.peer) for op in got if op.tensor is T.O] == [(3, 5), (4, 5)]
    sent = [op for step in plan.steps[4] for op in step.comm if isinstance(op, Send)]
    assert {op.peer for op in sent if op.tensor in (T.Q, T.O)} == {3}
    assert [op.chunk for op in sent if op.tensor is T.O] == [5, 3]
    assert {op.peer for op in sent if op.tensor is T.KV} == {1}


def test_one_row_is_a_ring():
    for n in (2, 5, 8):
        for backward in (False, True):
            mesh, ring = MESH.plan(n, grid=(1, n), backward=backward), RING.plan(n, backward=backward)
            assert verify(mesh).volume == verify(ring).volume
            assert pairs(mesh) == pairs(ring)
            for transfer in (1.5, 3):  # where blocks hide less than the transfers, both take the same time
                times = [trace(plan, transfer_time=lambda op, t=transfer: t).finish for plan in (mesh, ring)]
                assert times[0] == pytest.approx(times[1])


# -- schedules -------------------------------------------------------------------------------------------------------


def test_forward_schedule_of_the_nine_rank_example():
    """Alg. 2 by hand for a 3 × 3 tile (Figure 5e) with c_Q = 1, c_KV = 2, c_O = 1."""
    assert local(3, 3, False) == (
        (T.Q, ((0, 0),)),  # 1/1 > 1/2
        (T.KV, ((1, 0),)),  # 1/1 against 2/2: not more; only one block is ready
        (T.Q, ((1, 1),)),  # 2/1 > 2/2; the own row waits
        (T.KV, ((2, 0), (2, 1))),  # all queries are there
        (None, ((1, 2),)),  # row 1 must be complete before it leaves
        (T.O, ((2, 2),)),
        (T.O, ((0, 1),)),  # only now the own row
        (None, ((0, 2),)),
    )


def test_backward_schedule_of_the_nine_rank_example():
    """Alg. 3 by hand for a 3 × 3 tile with c_OdOQ = 3, c_KV = 2, c_dQ = 1, c_dKV = 2."""
    assert local(3, 3, True) == (
        (T.KV, ((0, 0),)),  # 1/3 < 1/2
        (T.QDO, ((0, 1),)),  # 2/3 > 1/2
        (T.KV, ((1, 1), (1, 0))),  # 2/3 < 2/2; column 1 lacks 2: 2/2 > 1/3, then (2, 1) is not ready
        (T.QDO, ((0, 2), (1, 2))),  # by columns: 2/1 > 1/1
        (T.DQ, ((2, 1),)),  # row 1 is complete; column 1 lacks one: 2/1 > 1/3
        (T.DKV, ((2, 2), (2, 0))),
        (T.DQ, ()),
        (T.DKV, ()),
    )


def test_backward_alternates_between_rows_and_columns():
    """Alg. 3 by hand in a 2 × 4 tile of equal costs: first what lacks fewer blocks, the row if both lack the same."""
    costs = {True: {T.QDO: 1, T.KV: 1, T.DQ: 1, T.DKV: 1}}
    order = [block for _, blocks in local(2, 4, True, costs) for block in blocks]
    assert order == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (1, 0), (1, 3), (0, 3)]
    costs[True][T.DQ] = 9
    order = [block for _, blocks in local(2, 4, True, costs) for block in blocks]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (0, 2), (0, 3)]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("costs", [BY_SIZE, LONG, UNEVEN])
def test_schedules_keep_the_rules_of_the_paper(backward, costs):
    query = T.QDO if backward else T.Q
    for a, b in ((1, 1), (1, 6), (6, 1), (3, 3), (4, 7), (8, 8), (2, 16)):
        moved, done, alone = Counter(), [], False
        steps = local(a, b, backward, costs)
        for tensor, blocks in steps:
            assert not (alone and tensor in (query, T.KV)), "blocks wait alone only after all receives"
            alone |= tensor is None
            ready = {(u, v) for u in range(moved[query] + 1) for v in range(moved[T.KV] + 1)} - set(done)
            assert set(blocks) <= ready, "computed before it was received in an earlier step"
            limit = math.ceil(costs[backward][tensor]) if tensor else 1
            assert len(blocks) == min(limit, len(ready)), "just enough to hide the transfer, or all there is"
            if not backward:
                own = sum(u == 0 for u, _ in blocks)
                assert own == max(0, len(blocks) - sum(u > 0 for u, _ in ready)), "own row before a row that leaves"
            line = moved[tensor] + 1
            if tensor in (T.O, T.DQ):
                assert all((line, v) in done for v in range(b)), "left before its row was complete"
            if tensor is T.DKV:
                assert all((u, line) in done for u in range(a)), "left before its column was complete"
            moved[tensor] += 1
            done += blocks
        assert sorted(done) == [(u, v) for u in range(a) for v in range(b)]
        assert sum(tensor is not None for tensor, _ in steps) == 2 * (a - 1) + (b - 1) * (2 if backward else 1)


@pytest.mark.parametrize("n,grid,mesh,ring", [(9, (3, 3), (11, 15), (17, 32)), (64, (8, 8), (65, 74), (127, 252))])
def test_greedy_schedule_hides_what_a_ring_cannot(n, grid, mesh, ring):
    """In block times, if a unit of transfer takes one: all but the ends is hidden; a ring waits half of the time."""

    def finish(strategy, backward, **options):
        costs = BY_SIZE[backward]
        plan = strategy.plan(n, backward=backward, **options)
        return trace(plan, transfer_time=lambda op: costs[op.tensor]).finish

    assert tuple(finish(MESH, backward, grid=grid, q_transfer_blocks=2) for backward in (False, True)) == mesh
    assert tuple(finish(RING, backward) for backward in (False, True)) == ring


# -- options ---------------------------------------------------------------------------------------------------------


def test_default_grid_has_the_least_volume():
    for n in range(1, 65):
        for kv_ratio in (1, 0.5, 0.25, 1 / 33):
            least = min(expected_volume(*grid, False, kv_ratio).total() for grid in grids(n))
            assert expected_volume(*best_grid(n, kv_ratio), False, kv_ratio).total() == least
    assert [best_grid(n) for n in (1, 8, 9, 12, 36, 64)] == [(1, 1), (4, 2), (3, 3), (4, 3), (6, 6), (8, 8)]
    assert [best_grid(64, ratio) for ratio in (0.25, 1 / 16, 1 / 64)] == [(4, 16), (2, 32), (1, 64)]
    few = {"heads": 8, "kv_heads": 2}
    assert [*MESH.plan(64, **few).steps] == [*MESH.plan(64, grid=(4, 16), **few).steps]


def test_costs_are_bytes():
    assert dict(costs_by_bytes(False, 0.25, 3)) == {T.Q: 3, T.KV: 1.5, T.O: 6}
    assert dict(costs_by_bytes(True, 0.25, 5)) == {T.QDO: 4, T.KV: 1, T.DQ: 4, T.DKV: 2}
    assert [*MESH.plan(9).steps] == [*MESH.plan(9, q_transfer_blocks=1).steps]
    assert [*MESH.plan(9).steps] != [*MESH.plan(9, q_transfer_blocks=3).steps] == [*MESH.plan(9, q_cost=3).steps]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"grid": (3, 4)}, r"--cp-grid 3x4: .* product is the 9 context ranks, such as 3x3"),
        ({"grid": (-3, -3)}, r"--cp-grid -3x-3: need two whole numbers, such as 3x3"),
        ({"grid": (9,)}, r"--cp-grid 9: need two whole numbers, such as 3x3"),
        ({"grid": "3x"}, r"--cp-grid 3x: need two whole numbers, such as 3x3"),
        ({"q_transfer_blocks": 0}, r"--cp-q-transfer-blocks 0: need a number, above 0, such as 4"),
        ({"q_transfer_blocks": math.inf}, r"--cp-q-transfer-blocks inf: need a number, above 0"),
        ({"layout": "contiguous"}, r"--cp-layout contiguous: not supported by mesh; choose zigzag or cyclic"),
        ({"tile": (3, 3)}, r"--cp-strategy mesh: no option tile; it has grid, q_transfer_blocks"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        MESH.plan(9, **options)


# -- exactness -------------------------------------------------------------------------------------------------------


def attend(n, heads, kv_heads, causal, layout, dtype=torch.float32, **options):
    cp = AllRanks(n, "mesh", layout, **options)

    def run(q, k, v):
        return context_parallel_attention(q, k, v, cp, causal=causal, return_lse=True)

    return gradients(run, *problem(n, heads, kv_heads, dtype))


@pytest.mark.parametrize("n", [1, 4, 6, 9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_float32(n, causal):
    for i, grid in enumerate([None, *grids(n)]):
        heads, kv_heads = HEADS[(n + i + causal) % 3]
        layout, q_transfer_blocks = MESH.layouts[i % 2], EVERY_COST[i % 4]
        got = attend(n, heads, kv_heads, causal, layout, grid=grid, q_transfer_blocks=q_transfer_blocks)
        for what, error in zip(WHAT, errors(got, exact(n, heads, kv_heads, torch.float32, causal)), strict=True):
            assert error < 2e-6, f"{grid} {layout} {heads}/{kv_heads} {what}: {error:.1e}"


@pytest.mark.parametrize("n,layout", [(15, "zigzag"), (36, "cyclic")])
def test_float32_on_many_ranks(n, layout):
    got = attend(n, 4, 4, True, layout)
    assert max(errors(got, exact(n, 4, 4, torch.float32, True))) < 2e-6


def _on_rank(layout: str, grid: tuple[int, int]) -> list[torch.Tensor]:
    cp = ContextParallel("mesh", layout, grid=grid)
    q, k, v, dout = (cp.shard(x) for x in problem(4, 4, 4, torch.float32))
    return gradients(lambda *x: context_parallel_attention(*x, cp, return_lse=True), q, k, v, dout)


@pytest.mark.parametrize("grid", grids(4))
@pytest.mark.parametrize("layout", MESH.layouts)
def test_exact_between_processes(ranks, grid, layout):
    per_rank = ranks(4, _on_rank, layout, grid)
    got = [unshard(list(parts), layout) for parts in zip(*per_rank, strict=True)]
    assert max(errors(got, exact(4, 4, 4, torch.float32, True))) < 2e-6
    for r in range(4):
        assert torch.equal(shard(got[0], layout, r, 4), per_rank[r][0])
