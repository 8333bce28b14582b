"""Mesh-Attention (Chen et al. 2025): every rank computes a tile of a query chunks × b key/value chunks, a·b = n.

Queries and partial outputs move around a query group (a consecutive ranks). Keys and values move around a key/value
group (the ranks equal modulo a). Chunk numbers are rotated (Table 1), so that each tile contains the pair of its own
rank. `mesh_schedule` schedules messages and the blocks that hide them with a greedy rule, equally for all ranks.
Units received per rank, with r = kv_heads / heads: forward (a-1) Q + 2r(b-1) KV + (a-1) O; backward 2(a-1) QDO +
2r(b-1) KV + (a-1) DQ + 2r(b-1) DKV. With a = 1 it is a ring.
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Annotated

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import Grid, Option, divisors
from megatron.context_parallel.plan.ir import PARTIAL, Attend, Comm, Step, T

from .mesh_schedule import costs_by_bytes, greedy_steps
from .messages import Ring
from .registry import Pass, register


def _near(n: int, q_transfer_blocks: float) -> list[float]:
    """1, and powers of two near `q_transfer_blocks`; the schedule rounds costs up to blocks, of which a tile has n."""
    nearest = round(math.log2(min(max(q_transfer_blocks, 0.5), n)))
    return sorted({1.0, *(2.0**power for power in (nearest - 1, nearest, nearest + 1))})


def _query_group(at: Pass, grid: Grid | None = None, q_transfer_blocks: float = 1.0) -> int:
    """The ranks after which the groups repeat."""
    return (best_grid(at.n, at.kv_ratio) if grid is None else grid)[0]


@register("mesh", layouts=("zigzag", "cyclic"), channels=("keys", "queries"), period=_query_group)
def mesh(
    at: Pass,
    *,
    grid: Annotated[Grid | None, Option("query x key/value chunks of a tile; default: least volume", (2, 4))] = None,
    q_transfer_blocks: Annotated[
        float, Option("time to send a chunk of queries, in units of a forward block", 4, tries=_near, formerly="q_cost")
    ] = 1.0,
) -> Iterator[Step]:
    """Row u of a rank's tile is Q#u and O#u of Table 1, column v is KV#v; place 0 has its own chunk."""
    a, b = best_grid(at.n, at.kv_ratio) if grid is None else _checked(grid, at.n, at.kv_ratio)
    queries, keys = circles(at.rank, a, b)
    moved = Counter[T]()
    for tensor, blocks in greedy_steps(a, b, at.backward, costs_by_bytes(at.backward, at.kv_ratio, q_transfer_blocks)):
        comm: tuple[Comm, ...] = ()
        if tensor:
            circle = keys if tensor in (T.KV, T.DKV) else queries
            nth = moved[tensor] + (tensor in PARTIAL)  # own inputs are sent first; own partials are never sent
            comm = circle.shift(tensor, partial(_nth, circle, nth), by=-1)
            moved[tensor] += 1
        tile = ((queries.rank(queries.place + u), keys.rank(keys.place + v)) for u, v in blocks)
        yield Step(comm, tuple(Attend((q,), (kv,)) for q, kv in tile))


def circles(rank: int, a: int, b: int) -> tuple[Ring, Ring]:
    """The query group and the key/value group of a rank."""
    queries = Ring(rank % a, a, rank - rank % a, channel="queries")
    return queries, Ring(rank // a, b, rank % a, a, channel="keys")


def _nth(circle: Ring, nth: int, place: int) -> int:
    return circle.rank(place + nth)


@cache
def best_grid(n: int, kv_ratio: float = 1.0) -> Grid:
    """The a × b = n with the least forward volume; among equal ones, the one with the least backward volume."""

    def volume(grid: Grid) -> tuple[float, float]:
        q, kv = grid[0] - 1, 2 * kv_ratio * (grid[1] - 1)
        return 2 * q + kv, 3 * q + 2 * kv

    return min(((a, n // a) for a in divisors(n)), key=volume)


def _checked(grid: Grid, n: int, kv_ratio: float) -> Grid:
    if grid[0] * grid[1] != n:
        a, b = best_grid(n, kv_ratio)
        why = f"needs two sizes whose product is the {n} context ranks, such as {a}x{b}"
        raise UsageError(f"--cp-grid {grid[0]}x{grid[1]}: {why}")
    return grid
