"""Attention2D (Elango 2025): ranks form a grid; queries are shared along its rows, keys and values along its columns.

The grid has `rows` × `cols` = n ranks in column-major order: rank p is in row p % rows, column p // rows. With cyclic
chunks a row's own chunks are the queries congruent to the row modulo `rows`. A column computes the keys congruent to
the column modulo `cols`, so keys and values first move there (`transposed`). Then a rank computes its row's queries
against its column's keys, and partial outputs are reduced along the row, each to its owner.

Overlapping (algorithms 4-6): queries go round the row to the left and keys and values up the column. The rank's own
query chunk is computed against each key/value chunk as it comes (GTHRCMPT), the others each against all of them in
one block, while the next queries arrive and the last partial output is passed on to the left (GTHRCMPTSCTR): two
travelling query chunks alive at most. Backward (algorithms 8-11) likewise; the last query chunk is computed against one
key/value chunk at a time, whose gradient then goes up the column (CMPTSCTRBWD). Not overlapping (algorithms 1 and 3):
the same by collectives and one block.

Balance: a causal mask leaves a rank N²/2n pairs of tokens on average, in any grid. By counting the lattice points under
the diagonal two ranks differ by at most a fraction 2(rows + cols - 1)/N of that.

Volume received per rank, where t is 1 if its keys and values move and 0 if not: forward 2(cols-1) + 2(rows-1) + 2t
units, backward 3(cols-1) + 4(rows-1) + 4t.
"""

import math
from dataclasses import dataclass
from functools import cache

from ..errors import UsageError
from ..plan.ir import AllGather, Attend, Comm, Recv, ReduceScatter, Send, Step, T
from .registry import register


@register("attention2d", layouts=("cyclic",), options=("grid", "overlap"))
def attention2d(
    r: int,
    n: int,
    layout: str,
    causal: bool,
    backward: bool,
    *,
    grid: tuple[int, int] | None = None,
    overlap: bool = True,
) -> tuple[Step, ...]:
    """Steps of rank r of n.

    Args:
        grid: (rows, cols); by default the most square with rows ≤ cols.
        overlap: compute while chunks go round rings; if not, gather, compute, scatter.
    """
    if not isinstance(overlap, bool):
        raise UsageError(f"--cp-overlap {overlap!r}: is no switch; give True or False")
    rows, cols = most_square(n) if grid is None else _checked(grid, n)
    row, col = r % rows, r // rows
    held = transposed(rows, cols)
    in_row = tuple(row + rows * ((col + i) % cols) for i in range(cols))
    in_col = tuple((row + i) % rows + rows * col for i in range(rows))
    queries, keys = _Ring(in_row, in_row, "row"), _Ring(in_col, tuple(held[p] for p in in_col), "column")
    there = _move(T.KV, r, held.index(r), held[r], held[r])
    back = _move(T.DKV, held[r], held[r], r, held.index(r)) if backward else ()
    steps = (_overlapping if overlap else _collective)(queries, keys, there, back, backward)
    return tuple(step for step in steps if step.comm or step.attend)


def most_square(n: int) -> tuple[int, int]:
    """The grid nearest a square, rows ≤ cols: a row moves 5 units forward and backward per member, a column 6."""
    rows = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    return rows, n // rows


@cache
def transposed(rows: int, cols: int) -> tuple[int, ...]:
    """The key/value chunk of each rank once every column holds the chunks congruent to it modulo `cols`.

    A rank whose column wants the chunk it has keeps it; the others take, in order, what their column still lacks. So
    each rank gives and takes at most one chunk. In a square grid that is the paper's transposition.
    """
    held: list[int] = []
    for col in range(cols):
        ranks, wanted = range(rows * col, rows * (col + 1)), range(col, rows * cols, cols)
        lacking = (chunk for chunk in wanted if chunk not in ranks)
        held += [p if p in wanted else next(lacking) for p in ranks]
    return tuple(held)


@dataclass(frozen=True)
class _Ring:
    """A row or column seen from one rank: the others in the order in which their chunks reach it, itself first."""

    ranks: tuple[int, ...]
    chunks: tuple[int, ...]
    channel: str

    def gather(self, tensor: T, s: int) -> tuple[Comm, ...]:
        """Step s of a gather: pass on chunk s, take chunk s+1, until all are here."""
        if s + 1 >= len(self.chunks):
            return ()
        return self._pass_on(tensor, s, s + 1, reduce=False)

    def scatter(self, tensor: T, s: int) -> tuple[Comm, ...]:
        """Step s of a reduce-scatter: pass on the partial of chunk s-1, take that of chunk s; the own comes last."""
        if not 1 < s <= len(self.chunks):
            return ()
        return self._pass_on(tensor, s - 1, s % len(self.chunks), reduce=True)

    def _pass_on(self, tensor: T, sent: int, taken: int, reduce: bool) -> tuple[Comm, ...]:
        return (
            Send(tensor, self.chunks[sent], self.ranks[-1], self.channel),
            Recv(tensor, self.chunks[taken], self.ranks[1], reduce, self.channel),
        )

    def gather_all(self, tensor: T) -> tuple[Comm, ...]:
        return self._all(AllGather, tensor)

    def scatter_all(self, tensor: T) -> tuple[Comm, ...]:
        return self._all(ReduceScatter, tensor)

    def _all(self, collective: type[AllGather | ReduceScatter], tensor: T) -> tuple[Comm, ...]:
        if len(self.ranks) == 1:
            return ()
        pairs = sorted(zip(self.ranks, self.chunks, strict=True))  # one order for all members
        return (collective(tensor, *zip(*pairs, strict=True), channel=self.channel),)


def _move(tensor: T, sent: int, to: int, taken: int, source: int) -> tuple[Comm, ...]:
    """One leg of the transposition, there or back; nothing if the rank keeps its chunk."""
    if sent == taken:
        return ()
    return Send(tensor, sent, to, "transpose"), Recv(tensor, taken, source, channel="transpose")


def _overlapping(queries: _Ring, keys: _Ring, there: tuple, back: tuple, backward: bool) -> list[Step]:
    query, result = (T.QDO, T.DQ) if backward else (T.Q, T.O)
    rows, cols = len(keys.ranks), len(queries.ranks)
    steps = [Step(there)]
    for s, chunk in enumerate(queries.chunks):
        along = (*queries.gather(query, s), *queries.scatter(result, s))
        first, last = s == 0, backward and s == cols - 1
        if not (first or last):
            steps.append(Step(along, (Attend((chunk,), keys.chunks),)))
            continue
        steps.append(Step(along))
        for i in range(rows) if first else range(1, rows + 1):
            up = (*(keys.gather(T.KV, i) if first else ()), *(keys.scatter(T.DKV, i) if last else ()))
            steps.append(Step(up, (Attend((chunk,), (keys.chunks[i % rows],)),)))
    up = keys.scatter(T.DKV, rows) if backward and cols == 1 else ()
    return [*steps, Step((*queries.scatter(result, cols), *up)), Step(back)]


def _collective(queries: _Ring, keys: _Ring, there: tuple, back: tuple, backward: bool) -> list[Step]:
    query, result = (T.QDO, T.DQ) if backward else (T.Q, T.O)
    gradients = keys.scatter_all(T.DKV) if backward else ()
    return [
        Step((*there, *queries.gather_all(query))),
        Step(keys.gather_all(T.KV), (Attend(queries.chunks, keys.chunks),)),
        Step((*queries.scatter_all(result), *gradients)),
        Step(back),
    ]


def _checked(grid: tuple[int, int], n: int) -> tuple[int, int]:
    pair = isinstance(grid, tuple | list) and len(grid) == 2 and all(type(size) is int and size > 0 for size in grid)
    if not pair or math.prod(grid) != n:
        shown = "x".join(map(str, grid)) if isinstance(grid, tuple | list) else grid
        rows, cols = most_square(n)
        raise UsageError(
            f"--cp-grid {shown}: needs rows x columns whose product is the {n} context ranks, such as {rows}x{cols}"
        )
    return grid[0], grid[1]
