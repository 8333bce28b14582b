"""Attention2D (Elango 2025): ranks form a grid; rows share queries, columns share keys and values.

Rank p of a grid of `rows` × `cols` = n is in row p % rows and column p // rows. A row's own chunks are the queries
congruent to it modulo `rows`; a column takes the keys congruent to it modulo `cols`, which first move there
(`transposed`). Each rank computes its row's queries against its column's keys; outputs are reduced along the row.

Overlapping (algorithms 4-6): queries go round the row to the left, keys and values up the column. The first query chunk
is computed against each key chunk as it comes (GTHRCMPT), each other against all of them in one block, while the next
arrives and the last partial output moves on (GTHRCMPTSCTR): two travelling query chunks alive at most. Backward (8-11)
the last one is computed by key chunks again, while their gradients go up the column (CMPTSCTRBWD). Not overlapping (1
and 3): the same by collectives and one block.

Volume received per rank, t = 1 if its keys and values move, else 0: forward 2(cols-1) + 2(rows-1) + 2t units, backward
3(cols-1) + 4(rows-1) + 4t. In the cyclic layout causal work of two ranks differs by at most
2(rows + cols - 1)/N of their mean; in the zigzag one all chunk pairs are equal but for the diagonal.
"""

from dataclasses import dataclass
from functools import cache

from ..errors import UsageError
from ..mask import Pairs
from ..plan.ir import AllGather, Attend, Comm, Recv, ReduceScatter, Send, Step, T
from .registry import register

Grid = tuple[int, int]  # rows, columns


@register("attention2d", layouts=("zigzag", "cyclic"), options=("grid", "overlap"))
def attention2d(
    r: int, n: int, sees: Pairs, backward: bool, *, grid: Grid | None = None, overlap: bool = True
) -> tuple[Step, ...]:
    """Steps of rank r of n: on a grid (default: the most square), in rings that overlap blocks or by collectives."""
    if not isinstance(overlap, bool):
        raise UsageError(f"--cp-overlap {overlap!r}: is no switch; give True or False")
    rows, cols = grid_of(n, grid)
    row, col, held = r % rows, r // rows, transposed(rows, cols)
    in_row = tuple(row + rows * ((col + i) % cols) for i in range(cols))
    in_col = tuple((row + i) % rows + rows * col for i in range(rows))
    queries, keys = _Ring(in_row, in_row, "row"), _Ring(in_col, tuple(held[p] for p in in_col), "column")
    there = _move(T.KV, r, held.index(r), held[r], held[r])
    back = _move(T.DKV, held[r], held[r], r, held.index(r)) if backward else ()
    steps = (_overlapping if overlap else _collective)(queries, keys, backward)
    return tuple(step for step in (Step(there), *steps, Step(back)) if step.comm or step.attend)


def grid_of(n: int, grid: Grid | None = None) -> Grid:
    """`grid` if it fits n ranks; by default the most square, rows ≤ cols: a column costs 6 units a rank, a row 5."""
    grids = [(rows, n // rows) for rows in range(1, n + 1) if n % rows == 0]
    rows, cols = max(g for g in grids if g[0] <= g[1])
    if grid is not None and grid not in grids:
        given = "x".join(map(str, grid)) if isinstance(grid, tuple) else grid
        raise UsageError(f"--cp-grid {given}: rows x columns must be the {n} context ranks, such as {rows}x{cols}")
    return grids[grids.index(grid or (rows, cols))]


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


def _move(tensor: T, sent: int, to: int, taken: int, source: int) -> tuple[Comm, ...]:
    """One leg of the transposition, there or back; nothing if the rank keeps its chunk."""
    swap = Send(tensor, sent, to, "transpose"), Recv(tensor, taken, source, False, "transpose")
    return () if sent == taken else swap


@dataclass(frozen=True)
class _Ring:
    """A row or column seen from one rank: members in the order in which their chunks reach it, itself first."""

    ranks: tuple[int, ...]
    chunks: tuple[int, ...]
    channel: str

    def gather(self, tensor: T, s: int) -> tuple[Comm, ...]:
        """Step s of a gather: pass chunk s on, take the next, until all are here."""
        return self._hop(tensor, s, False) if s + 1 < len(self.ranks) else ()

    def scatter(self, tensor: T, s: int) -> tuple[Comm, ...]:
        """Step s of a reduce-scatter: pass the partial of chunk s-1 on, take the next; the own one comes last."""
        return self._hop(tensor, s - 1, True) if 1 < s <= len(self.ranks) else ()

    def _hop(self, tensor: T, i: int, reduce: bool) -> tuple[Comm, ...]:
        to, source, taken = self.ranks[-1], self.ranks[1], self.chunks[(i + 1) % len(self.chunks)]
        return Send(tensor, self.chunks[i], to, self.channel), Recv(tensor, taken, source, reduce, self.channel)

    def together(self, collective: type[AllGather | ReduceScatter], tensor: T) -> tuple[Comm, ...]:
        members = zip(*sorted(zip(self.ranks, self.chunks, strict=True)), strict=True)  # in one order for all
        return (collective(tensor, *members, self.channel),) if len(self.ranks) > 1 else ()


def _overlapping(queries: _Ring, keys: _Ring, backward: bool) -> list[Step]:
    query, result = (T.QDO, T.DQ) if backward else (T.Q, T.O)
    rows, cols, steps = len(keys.ranks), len(queries.ranks), []
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
    home = keys.scatter(T.DKV, rows) if backward and cols == 1 else ()
    return [*steps, Step((*queries.scatter(result, cols), *home))]


def _collective(queries: _Ring, keys: _Ring, backward: bool) -> list[Step]:
    query, result = (T.QDO, T.DQ) if backward else (T.Q, T.O)
    gathers = (*queries.together(AllGather, query), *keys.together(AllGather, T.KV))
    scatters = (*queries.together(ReduceScatter, result), *(keys.together(ReduceScatter, T.DKV) if backward else ()))
    return [Step(gathers, (Attend(queries.chunks, keys.chunks),)), Step(scatters)]
