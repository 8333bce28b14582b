"""Mesh-Attention (Chen et al. 2025): every rank computes a tile of a query chunks × b key/value chunks, a·b = n.

Ranks of a query group (a consecutive ranks) pass queries round and partial outputs on; ranks of a key/value group
(those equal modulo a) pass keys and values round. Chunk numbers are rotated (Table 1) so that each tile holds its
rank's own pair. What moves when, and which blocks hide it, is `mesh_schedule`'s greedy choice, the same on all ranks.
Volume received per rank, with r = kv_heads / heads: forward (a-1) Q + 2r(b-1) KV + (a-1) O; backward 2(a-1) QDO +
2r(b-1) KV + (a-1) DQ + 2r(b-1) DKV. With a = 1 it is a ring.
"""

from collections import Counter
from functools import cache

from ..errors import UsageError
from ..mask import Pairs
from ..plan.ir import PARTIAL, Attend, Comm, Recv, Send, Step, T
from .mesh_schedule import TRAVELS, Costs, check_costs, default_costs, schedule
from .registry import register


@register("mesh", layouts=("zigzag", "cyclic"), options=("grid", "costs", "kv_ratio"))
def mesh(
    r: int,
    n: int,
    sees: Pairs,
    backward: bool,
    *,
    grid: tuple[int, int] | None = None,
    costs: Costs | None = None,
    kv_ratio: float = 1.0,
) -> tuple[Step, ...]:
    """Steps of rank r of n.

    `grid` is (a, b), by default the one of least volume; `costs` are transfer times in blocks, by default in proportion
    to bytes (see `mesh_schedule`); `kv_ratio` is kv_heads / heads, which both defaults depend on.
    """
    if not 0 < kv_ratio <= 1:
        raise UsageError(f"kv_ratio {kv_ratio}: need key/value heads over heads, above 0 and at most 1, such as 0.25")
    a, b = best_grid(n, kv_ratio) if grid is None else _checked(grid, n, kv_ratio)
    costs = default_costs(kv_ratio) if costs is None else check_costs(costs)
    way = "backward" if backward else "forward"
    steps, moved = [], Counter()
    for tensor, blocks in schedule(a, b, backward, tuple((t, costs[way][t]) for t in TRAVELS[way])):
        comm = _pass_on(tensor, moved[tensor], r, a, n) if tensor else ()
        moved[tensor] += 1
        attend = tuple(Attend((query_chunk(r, u, a),), (kv_chunk(r, v, a, n),)) for u, v in blocks)
        steps.append(Step(comm, attend))
    return tuple(steps)


def query_chunk(r: int, u: int, a: int) -> int:
    """Row u of rank r's tile (Q#u and O#u of Table 1)."""
    return r - r % a + (r + u) % a


def kv_chunk(r: int, v: int, a: int, n: int) -> int:
    """Column v of rank r's tile (KV#v of Table 1)."""
    return (r + a * v) % n


def _pass_on(tensor: T, nth: int, r: int, a: int, n: int) -> tuple[Comm, ...]:
    """The nth Recv Q/KV or Send O/dQ/dKV of section 3.4: pass one chunk on, take the next one from the other side."""
    keys = tensor in (T.KV, T.DKV)
    channel = "keys" if keys else "queries"

    def chunk(i: int) -> int:
        return kv_chunk(r, i, a, n) if keys else query_chunk(r, i, a)

    partial = tensor in PARTIAL
    first = nth + 1 if partial else nth  # own inputs leave first; own partials never leave
    following, previous = chunk(-1), chunk(1)  # chunk i belongs to rank i
    return (
        Send(tensor, chunk(first), following, channel),
        Recv(tensor, chunk(first + 1), previous, reduce=partial, channel=channel),
    )


@cache
def best_grid(n: int, kv_ratio: float = 1.0) -> tuple[int, int]:
    """The a × b = n of least forward volume; of equal ones, the one of least backward volume."""

    def volume(grid: tuple[int, int]) -> tuple[float, float]:
        q, kv = grid[0] - 1, 2 * kv_ratio * (grid[1] - 1)
        return 2 * q + kv, 3 * q + 2 * kv

    return min(((a, n // a) for a in range(1, n + 1) if n % a == 0), key=volume)


def _checked(grid: tuple[int, int], n: int, kv_ratio: float) -> tuple[int, int]:
    good = isinstance(grid, tuple | list) and len(grid) == 2 and all(isinstance(x, int) and x > 0 for x in grid)
    if not good or grid[0] * grid[1] != n:
        shown = "x".join(map(str, grid)) if isinstance(grid, tuple | list) else grid
        a, b = best_grid(n, kv_ratio)
        raise UsageError(f"--cp-grid {shown}: needs two sizes whose product is the {n} context ranks, such as {a}x{b}")
    return grid[0], grid[1]
