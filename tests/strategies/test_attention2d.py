"""Attention2D: every grid proved and counted, its transposition and balance, what overlaps, exactness, refusals."""

import itertools
import math
from collections import Counter

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.kernels.reference import Reference, attention
from megatron.context_parallel.plan.ir import AllGather, Plan, Recv, ReduceScatter, T
from megatron.context_parallel.plan.liveness import last_reads
from megatron.context_parallel.plan.trace import trace
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import received, units
from megatron.context_parallel.strategies.attention2d import grid_of, transposed
from megatron.context_parallel.tokens.layout import unshard
from tests.support.exact import DIM, HEADS, WHAT, errors, exact, gradients, problem
from tests.support.sizes import SIZES

attention2d = STRATEGIES["attention2d"]
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "collectives"])


def grids(n: int) -> list[tuple[int, int]]:
    return [(rows, n // rows) for rows in range(1, n + 1) if n % rows == 0]


def expected_volume(grid: tuple[int, int], p: int, backward: bool) -> Counter:
    """Units rank p receives; its keys and values move unless its column is the one that wants them."""
    rows, cols = grid
    kv = 2 * (rows - 1) + 2 * (p % cols != p // rows)
    if backward:
        return +Counter({T.QDO: 2 * (cols - 1), T.KV: kv, T.DQ: cols - 1, T.DKV: kv})
    return +Counter({T.Q: cols - 1, T.KV: kv, T.O: cols - 1})


@OVERLAP
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_grid_is_proved(overlap, backward):
    for n in range(1, 13):
        for grid in grids(n):
            for causal in (True, False):
                report = verify(attention2d.plan(n, causal=causal, backward=backward, grid=grid, overlap=overlap))
                assert report.idle == pytest.approx(0, abs=1e-12)
                for p, volume in enumerate(report.volume):
                    assert volume == expected_volume(grid, p, backward), (grid, p)


@OVERLAP
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_large_grids_are_proved(overlap, backward):
    for n in [15, 18, 24, 29, 36, 48, 64]:
        for grid in {grid_of(n), grid_of(n)[::-1]}:
            verify(attention2d.plan(n, causal=n % 2 == 0, backward=backward, grid=grid, overlap=overlap))


@OVERLAP
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_volume_of_every_grid(overlap, backward):
    for n in SIZES:
        for grid in grids(n):
            plan = attention2d.plan(n, backward=backward, grid=grid, overlap=overlap)
            for p in {0, n // 2, n - 1}:  # all ranks where plans are verified
                assert received(plan, p) == expected_volume(grid, p, backward), (grid, p)


@OVERLAP
def test_volume_of_square_grids_is_that_of_the_paper(overlap):
    """Section 3.3, constants included, for P = side²; backward, O stays at home and K, V are transposed again."""
    for side in (2, 3, 4, 6):
        n = side * side
        forward, backward = (verify(attention2d.plan(n, backward=b, overlap=overlap)).received for b in (False, True))
        transposition = 2
        paper_forward = transposition + (1 + 2 + 1) * (side - 1)  # Q; K, V; O
        paper_backward = (3 + 2 + 1 + 2) * (side - 1) + transposition  # Q, O, dO; K, V; dQ; dK, dV
        assert forward == paper_forward == 4 * side - 2
        assert backward == paper_backward - (side - 1) + transposition == 7 * side - 3
        assert paper_backward == 8 * side - 6
        # Table 1: O(N / sqrt(P)) words, where N is n chunks; a ring's volume does not shrink.
        assert forward / n <= 4 / math.sqrt(n)
        assert verify(STRATEGIES["ring"].plan(n)).received / n >= 1.5


def test_grouped_query_attention_prefers_more_rows():
    def both_ways(grid, kv_ratio):
        return sum(verify(attention2d.plan(32, backward=b, grid=grid), kv_ratio).received for b in (False, True))

    assert both_ways((4, 8), 1) == 5 * 7 + 6 * 3 + 6 < both_ways((8, 4), 1) == 5 * 3 + 6 * 7 + 6
    assert both_ways((4, 8), 0.25) == 5 * 7 + 1.5 * 3 + 1.5 > both_ways((8, 4), 0.25) == 5 * 3 + 1.5 * 7 + 1.5


def test_default_grid_is_the_grid_of():
    expected = {1: (1, 1), 2: (1, 2), 7: (1, 7), 12: (3, 4), 16: (4, 4), 24: (4, 6), 48: (6, 8), 64: (8, 8)}
    for n, grid in expected.items():
        assert grid_of(n) == grid
        assert [*attention2d.plan(n).steps] == [*attention2d.plan(n, grid=grid, overlap=True).steps]


def test_transposition_spreads_evenly():
    for n in range(1, 65):
        for rows, cols in grids(n):
            held = transposed(rows, cols)
            assert sorted(held) == list(range(n))
            for p, chunk in enumerate(held):
                assert chunk % cols == p // rows
                assert (chunk == p) == (p % cols == p // rows)
                if rows == cols:
                    assert chunk == p // rows + cols * (p % rows)  # algorithm 1, line 1: the chunk of p_{c,r}


def test_causal_work_is_balanced_in_tokens():
    for n in (4, 6, 9, 12, 24, 36, 64):
        for rows, cols in grids(n):
            length = 6 * n
            work = []
            for row, col in itertools.product(range(rows), range(cols)):
                work.append(sum((q - col) // cols + 1 for q in range(row, length, rows) if q >= col))
            assert sum(work) == length * (length + 1) // 2
            assert max(work) - min(work) <= 2 * (rows + cols - 1) / length * length**2 / (2 * n)


def most_alive(plan: Plan, tensor: T) -> int:
    """The most travelling copies of `tensor` any rank holds at once."""
    most = 0
    for r, steps in enumerate(plan.steps):
        last, arrived = last_reads(plan, r), []
        for s, step in enumerate(steps):
            for op in step.comm:
                if isinstance(op, Recv) and op.tensor is tensor:
                    arrived.append((s, last[tensor, op.chunk]))
                if isinstance(op, AllGather) and op.tensor is tensor:
                    arrived += [(s, last[tensor, c]) for m, c in zip(op.group, op.chunks, strict=True) if m != r]
            most = max(most, sum(first <= s <= end for first, end in arrived))
    return most


@pytest.mark.parametrize("grid", [(1, 16), (2, 8), (4, 4), (3, 12), (8, 8)])
def test_two_query_blocks_are_alive_and_memory_is_that_of_a_column(grid):
    rows, cols = grid
    for backward, query in ((False, T.Q), (True, T.QDO)):
        plans = [attention2d.plan(rows * cols, grid=grid, backward=backward, overlap=o) for o in (True, False)]
        assert [most_alive(plan, query) for plan in plans] == [2, cols - 1]
    if rows == 1:
        return
    peaks = [
        max(verify(attention2d.plan(rows * cols, grid=grid, backward=b, overlap=o)).peak)
        for o in (True, False)
        for b in (False, True)
    ]
    assert peaks == [2 * rows + 9, 4 * rows + 12, 2 * rows + 2 * cols + 2, 4 * rows + 3 * cols + 2]


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (4, 3)])
def test_rings_of_rows_and_columns_hide_behind_blocks(grid):
    """A hop up the column hides behind one block of a pair, one along the row behind a block of `rows` pairs; only the
    transpositions and the last hop of the partial outputs are paid."""
    n = math.prod(grid)

    def finish(backward: bool, **times: float) -> float:
        plan = attention2d.plan(n, grid=grid, backward=backward)
        return trace(plan, transfer_time=lambda op: times[op.tensor]).finish

    assert finish(False, KV=0.9, Q=grid[0] - 1.5, O=1.4) == pytest.approx(0.9 + n + 1.4)
    assert finish(True, KV=0.9, QDO=grid[0] - 1.3, DQ=1.2, DKV=0.9) == pytest.approx(0.9 + n + 1.2)
    assert finish(False, KV=1.5, Q=0, O=0) == pytest.approx(1.5 + 1.5 * (grid[0] - 1) + 1 + n - grid[0])


def test_blocks_are_as_large_as_they_can_be():
    """The first query chunk (and, backward, the last) block by block, the others against the column in one."""
    for backward, expected in ((False, [1] * 4 + [4] * 3), (True, [1] * 4 + [4] * 2 + [1] * 4)):
        for steps in attention2d.plan(16, backward=backward).steps:
            blocks = [attend for step in steps for attend in step.attend]
            assert all(len(attend.q_chunks) == 1 for attend in blocks)
            assert [len(attend.kv_chunks) for attend in blocks] == expected


def test_without_overlap_everything_is_paid():
    plan = attention2d.plan(16, overlap=False)
    # Rows gather during the transposition and the columns' gather; then the block; then the reduce-scatter.
    assert trace(plan, transfer_time=lambda transfer: units(transfer.tensor)).finish == pytest.approx(2 + 6 + 16 + 3)
    kinds = [type(op) for step in plan.steps[1] for op in step.comm]
    assert kinds.count(AllGather) == 2 and kinds.count(ReduceScatter) == 1
    assert sum(len(step.attend) for step in plan.steps[1]) == 1


def distributed(n, heads, kv_heads, dtype, causal, kernel=None, **options) -> list[torch.Tensor]:
    cp = AllRanks(n, "attention2d", **options)

    def run(q, k, v):
        return context_parallel_attention(q, k, v, cp, causal=causal, return_lse=True, kernel=kernel)

    return gradients(run, *problem(n, heads, kv_heads, dtype))


@OVERLAP
@pytest.mark.parametrize("n", [1, 2, 4, 6, 12])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact(n, causal, overlap):
    for i, grid in enumerate(sorted({grid_of(n), grid_of(n)[::-1]})):
        heads, kv_heads = HEADS[(n + i + causal + overlap) % 3]
        got = distributed(n, heads, kv_heads, torch.float32, causal, grid=grid, overlap=overlap)
        for what, error in zip(WHAT, errors(got, exact(n, heads, kv_heads, torch.float32, causal)), strict=True):
            assert error < 2e-6, f"{grid} {heads}/{kv_heads} {what}: {error:.1e}"


@OVERLAP
@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (4, 2), (3, 3)])
def test_float64_leaves_no_room_for_error(grid, overlap):
    n = math.prod(grid)
    got = distributed(n, 8, 2, torch.float64, True, Reference(), grid=grid, overlap=overlap)
    assert max(errors(got, exact(n, 8, 2, torch.float64, True))) < 1e-14


def _on_rank(options: dict) -> list[torch.Tensor]:
    cp = ContextParallel("attention2d", **options)
    q, k, v, dout = (cp.shard(x) for x in _whole())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        out, lse = context_parallel_attention(*leaves, cp, return_lse=True)
        grads = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), lse, *grads]


def _whole() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(24, 2, heads, DIM) for heads in (4, 2, 2, 4)]


@OVERLAP
@pytest.mark.parametrize("grid", [(2, 2), (4, 1), (1, 4), (1, 3)])
def test_exact_between_processes(ranks, grid, overlap):
    """Ranks on the diagonal take no part in the transposition, yet in making its communicator."""
    wide = [x.double() for x in _whole()]
    expected = gradients(lambda *x: attention(*x, causal=True, scale=DIM**-0.5), *wide)
    per_rank = ranks(math.prod(grid), _on_rank, {"grid": grid, "overlap": overlap})
    got = [unshard(parts, "zigzag") for parts in zip(*per_rank, strict=True)]
    assert max(errors(got, expected)) < 2e-6


@pytest.mark.parametrize(
    "options,message",
    [
        ({"grid": (2, 3)}, r"^--cp-grid 2x3: rows x columns must be the 8 context ranks, such as 2x4$"),
        ({"grid": (8,)}, r"--cp-grid 8: .*such as 2x4"),
        ({"grid": (-2, -4)}, r"--cp-grid -2x-4: .*such as 2x4"),
        ({"grid": "2x"}, r"--cp-grid 2x: .*such as 2x4"),
        ({"overlap": "maybe"}, r"^--cp-overlap maybe: give true or false$"),
        ({"layout": "contiguous"}, r"--cp-layout contiguous: not supported by attention2d; choose zigzag or cyclic"),
        ({"columns": 2}, r"--cp-strategy attention2d: no option columns; it has grid, overlap"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        attention2d.plan(8, **options)
