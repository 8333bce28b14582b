"""Attention2D (Elango 2025): ranks form a grid; rows share queries, columns share keys and values.

Rank p of a grid of `rows` × `cols` = n is in row p % rows and column p // rows. The queries of a row are the chunks
congruent to it modulo `rows`. The keys of a column are the chunks congruent to it modulo `cols`; they are first sent
there (`transposed`). Each rank computes the queries of its row against the keys of its column. Outputs are reduced
along the row.

With overlap (algorithms 4-6), queries move around the row to the left, and keys and values up the column. The first
query chunk is computed against each key chunk when it arrives (GTHRCMPT). Each other query chunk is computed against
all of them in one block. Meanwhile the next one arrives and the last partial output is sent on (GTHRCMPTSCTR). So at
most two query chunks of other ranks are alive. In the backward pass (8-11) the last query chunk is computed by key
chunks again, while their gradients move up the column (CMPTSCTRBWD). Without overlap (1 and 3), collectives and one
block do the same.

Units received per rank, with t = 1 if its keys and values are transposed and 0 otherwise: forward
2(cols-1) + 2(rows-1) + 2t, backward 3(cols-1) + 4(rows-1) + 4t. In the cyclic layout, causal work of two ranks differs
by at most 2(rows + cols - 1)/N of their mean. In the zigzag layout all chunk pairs are equal, except on the diagonal.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import Grid, Option, divisors
from megatron.context_parallel.plan.ir import AllGather, Attend, Comm, ReduceScatter, Step, T

from .messages import Ring, relay
from .registry import Pass, register


def _period(at: Pass, grid: Grid | None = None, overlap: bool = True) -> int | tuple[int, int] | None:
    """In a single row or column no keys are transposed, and every rank does the same.

    In a square, so do the ranks of a diagonal: where queries are a row further, keys are a column further.
    """
    rows, cols = grid_of(at.n, grid)
    if 1 in (rows, cols):
        return 1
    return (rows, rows) if rows == cols and overlap else None  # collectives are matched by their whole groups


@register("attention2d", layouts=("zigzag", "cyclic"), channels=("column", "row", "transpose"), period=_period)
def attention2d(
    at: Pass,
    *,
    grid: Annotated[Grid | None, Option("rows x columns of the rank grid; default: the most square", (2, 4))] = None,
    overlap: Annotated[bool, Option("overlap rings with blocks; if false, use collectives")] = True,
) -> Iterator[Step]:
    rows, cols = grid_of(at.n, grid)
    col, row = divmod(at.rank, rows)
    held = transposed(rows, cols)
    gives_to, takes_from = held.index(at.rank), held[at.rank]
    yield Step(relay(T.KV, at.rank, gives_to, takes_from, lambda rank: rank, "transpose"))
    queries, keys = Ring(col, cols, row, rows, "row"), Ring(row, rows, rows * col, channel="column")
    yield from (_overlapping if overlap else _collective)(at, queries, keys, held)
    if at.backward:
        yield Step(relay(T.DKV, at.rank, takes_from, gives_to, lambda rank: held[rank], "transpose"))


def grid_of(n: int, grid: Grid | None = None) -> Grid:
    """`grid` if it fits n ranks; by default the most square, rows ≤ cols: a column costs a rank 6 units, a row 5."""
    grids = [(rows, n // rows) for rows in divisors(n)]
    rows, cols = max(g for g in grids if g[0] <= g[1])
    if grid is not None and grid not in grids:
        why = f"rows x columns must be the {n} context ranks, such as {rows}x{cols}"
        raise UsageError(f"--cp-grid {grid[0]}x{grid[1]}: {why}")
    return grids[grids.index(grid or (rows, cols))]


@cache
def transposed(rows: int, cols: int) -> tuple[int, ...]:
    """The key/value chunk of each rank after the transposition: a column has the chunks congruent to it modulo `cols`.

    A rank keeps its chunk if its column needs it. The other ranks receive, in order, the chunks that their column still
    needs. So each rank sends and receives at most one chunk. In a square grid this is the paper's transposition.
    """
    held: list[int] = []
    for col in range(cols):
        ranks = range(rows * col, rows * (col + 1))
        wanted = range(col, rows * cols, cols)
        lacking = iter([chunk for chunk in wanted if chunk not in ranks])
        for rank in ranks:
            held.append(rank if rank in wanted else next(lacking))
    return tuple(held)


def _overlapping(at: Pass, queries: Ring, keys: Ring, held: tuple[int, ...]) -> Iterator[Step]:
    rows, cols = keys.size, queries.size
    column_keys = tuple(held[keys.rank(keys.place + i)] for i in range(rows))  # this column's keys, in order of arrival

    def hop(circle: Ring, tensor: T, i: int, chunks: Sequence[int]) -> tuple[Comm, ...]:
        """Each rank sends on the i-th chunk that it received."""
        return circle.shift(tensor, lambda p: chunks[circle.rank(p + i)], by=-1)

    def gather(circle: Ring, tensor: T, s: int, chunks: Sequence[int]) -> tuple[Comm, ...]:
        """Step s of a gather, until all chunks have arrived."""
        return hop(circle, tensor, s, chunks) if s + 1 < circle.size else ()

    def scatter(circle: Ring, tensor: T, s: int, chunks: Sequence[int]) -> tuple[Comm, ...]:
        """Step s of a reduce-scatter: the partial of chunk s-1 is sent on; the own one comes last."""
        return hop(circle, tensor, s - 1, chunks) if 1 < s <= circle.size else ()

    own = range(at.n)
    for s in range(cols):
        chunk = queries.rank(queries.place + s)
        along = gather(queries, at.query, s, own) + scatter(queries, at.result, s, own)
        first, last = s == 0, at.backward and s == cols - 1
        if not (first or last):
            yield Step(along, (Attend((chunk,), column_keys),))
            continue
        yield Step(along)
        for i in range(rows) if first else range(1, rows + 1):  # own keys last: their gradients stay
            up = gather(keys, T.KV, i, held) if first else ()
            up += scatter(keys, T.DKV, i, held) if last else ()
            yield Step(up, (Attend((chunk,), (column_keys[i % rows],)),))
    home = scatter(keys, T.DKV, rows, held) if at.backward and cols == 1 else ()
    yield Step(scatter(queries, at.result, cols, own) + home)


def _collective(at: Pass, queries: Ring, keys: Ring, held: tuple[int, ...]) -> Iterator[Step]:
    row, column = queries.ranks, keys.ranks
    column_keys = tuple(held[rank] for rank in column)

    def together(collective: type[AllGather | ReduceScatter], along: T, up: T | None) -> tuple[Comm, ...]:
        in_row = (collective(along, row, row, queries.channel),) if len(row) > 1 else ()
        return (*in_row, collective(up, column, column_keys, keys.channel)) if up and len(column) > 1 else in_row

    yield Step(together(AllGather, at.query, T.KV), (Attend(row, column_keys),))
    yield Step(together(ReduceScatter, at.result, T.DKV if at.backward else None))
