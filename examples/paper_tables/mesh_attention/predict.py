"""Mesh-Attention's tables: rings and tiles of this project's plans, on a testbed that the paper does not describe.

The tile of a case is the one that is predicted to be fastest, as the paper's tuner chooses it. Partial results are sent
in the model's dtype, as the paper counts them.
"""

import itertools
from functools import cache
from math import sqrt
from statistics import fmean

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.simulate.block_time import BlockTime
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.liveness import peak_bytes
from megatron.context_parallel.plan.volume import Shape, received
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask

from ..cells import Cell, Wanted, cell_by_cell, every_third_row, everything
from ..commands import attention_command

HEADS, HEAD_DIM = 32, 128  # section 4.1
LENGTHS = {"256K": 2**18, "512K": 2**19, "1M": 2**20}
GPUS = (32, 64, 128, 256)
WEAK = {32: 2**19, 256: round(sqrt(2) * 2**20 / 512) * 512}  # tokens of Figure 8b, whole chunks
RING, MESH = "ring", "mesh"
TILES = (4, 8)  # query chunks of the tiles that are tried: their ring stays inside a node
# In sizes of a query chunk: what the kernel and the merge hold of a block, beside what a plan counts.
WORKSPACE = {False: 8.4, True: 7.7}
GIB = 2**30

TESTBED = "mesh-attention"
CLUSTER = dict.fromkeys(("table_2", "table_3", "table_4", "table_5", "figure_8", "figure_9"), TESTBED)
FIELDS = {
    TESTBED: {
        "device.attention[0].forward_TFLOP_s": (92, 60, 119.2),
        "device.attention[0].backward_TFLOP_s": (80, 50, 119.2),
        "nics.GB_s": (6, 1, 12.5),
        "nics.stream_GB_s": (2, 0.5, 12.5),
        "nics.spread": (0.05, 0.001, 0.3),
    }
}


# Table 4 is Table 3 in another unit; `WORKSPACE` is read off the ring columns of Table 5.
FITTED = {table: every_third_row("mesh_attention", table) for table in ("table_3", "table_4", "table_5")}


# ------------------------------------------------------------------------------------------------- one attention


def plan_of(strategy: str, ranks: int, length: int, causal: bool, backward: bool) -> Plan:
    """Chunks are striped (section 3.7)."""
    choice = parse_spec(strategy, layout="cyclic")
    visible_pairs = Mask(causal).pairs(*Chunks.pair(choice.layout, ranks, length))
    return choice.plan(ranks, visible_pairs=visible_pairs, backward=backward, heads=HEADS, kv_heads=HEADS)


def shape(ranks: int, length: int) -> Shape:
    return Shape(length // ranks, HEADS, HEADS, HEAD_DIM, itemsize=2, partial_itemsize=2)


@cache
def seconds(cluster: Cluster, strategy: str, ranks: int, length: int, causal: bool) -> float:
    """Forward and backward."""
    part, sizes, mask = cluster.part(ranks), shape(ranks, length), Mask(causal)
    plans = [plan_of(strategy, ranks, length, causal, backward) for backward in (False, True)]
    return sum(simulate(plan, part, sizes, mask, all_up_to=1).seconds for plan in plans)


def strategy_of(cluster: Cluster, system: str, ranks: int, length: int, causal: bool) -> str:
    """A ring, or the fastest tile."""
    if system == RING:
        return RING
    # On 128 and 256 GPUs the paper's tiles have 8 query chunks (Table 5, Figure 9b); 4 would be as fast within 2 %.
    tiles = [f"mesh:grid={a}x{ranks // a}" for a in TILES if a == max(TILES) or ranks < 128]
    return min(tiles, key=lambda tile: seconds(cluster, tile, ranks, length, causal))


def time(cluster: Cluster, system: str, ranks: int, length: int, causal: bool = True) -> float:
    return seconds(cluster, strategy_of(cluster, system, ranks, length, causal), ranks, length, causal)


def computing(cluster: Cluster, system: str, ranks: int, length: int) -> float:
    """Seconds of a rank's blocks without communication."""
    total, mask = 0.0, Mask(True)
    for backward in (False, True):
        plan = plan_of(strategy_of(cluster, system, ranks, length, True), ranks, length, True, backward)
        blocks = BlockTime(cluster.device, plan, shape(ranks, length), mask, length, "bf16")
        total += sum(blocks(attend) for step in plan.steps[ranks // 2] for attend in step.attend)
    return total


def volume(cluster: Cluster, system: str, ranks: int, length: int) -> float:
    """Units of a whole sequence that a rank receives, forward and backward."""
    strategy = strategy_of(cluster, system, ranks, length, True)
    plans = [plan_of(strategy, ranks, length, True, backward) for backward in (False, True)]
    return sum(received(plan, ranks // 2).total() for plan in plans) / ranks


def peak_memory(cluster: Cluster, system: str, ranks: int, length: int, causal: bool, backward: bool) -> float:
    """GiB that a rank holds at most in a pass."""
    plan, sizes = plan_of(strategy_of(cluster, system, ranks, length, causal), ranks, length, causal, backward), None
    sizes = shape(ranks, length)
    query = sizes.rows * sizes.heads * sizes.head_dim * sizes.itemsize
    return (max(peak_bytes(plan, rank, sizes) for rank in (0, ranks // 2)) + WORKSPACE[backward] * query) / GIB


# -------------------------------------------------------------------------------------------------------- tables


def _case(row: str, column: str) -> tuple[str, int, int, bool]:
    """System, GPUs, tokens and mask of a cell of Tables 3 to 5."""
    mask, length = row.split()
    system, ranks = column.split()[:2]
    return system, int(ranks), LENGTHS[length], mask == "causal"


def _table_2() -> list[float | None]:
    """Units of a whole sequence on 32 GPUs; the paper approximates the same volume. StarTrail is no plan here."""
    systems = {"Ring-Attn": RING, "Ulysses": "ulysses:layout=zigzag", "StarTrail": None, "Mesh-Attn": "mesh"}
    found: list[float | None] = []
    for spec in systems.values():
        plan = parse_spec(spec).plan(32, causal=False) if spec else None
        found += [received(plan, 16).total() / 32 if plan else None] * 2
    return found


def _figure_8(cluster: Cluster) -> list[float | None]:
    ring = {n: time(cluster, RING, n, 2**20) for n in GPUS}
    mesh = {n: time(cluster, MESH, n, 2**20) for n in GPUS}
    weak = [time(cluster, system, 256, WEAK[256]) / time(cluster, system, 32, WEAK[32]) for system in (RING, MESH)]
    return [min(ring.values()), min(ring.values()) / min(mesh.values()), min(mesh.values()), *weak]


def _figure_9(cluster: Cluster) -> list[float | None]:
    cases = [*itertools.product((RING, MESH), GPUS)]
    total = {case: time(cluster, *case, 2**20) for case in cases}
    busy = {case: computing(cluster, *case, 2**20) for case in cases}
    moved = {case: volume(cluster, *case, 2**20) for case in cases}
    waits = [1 - (total[MESH, n] - busy[MESH, n]) / (total[RING, n] - busy[RING, n]) for n in GPUS]
    saved = [1 - moved[MESH, n] / moved[RING, n] for n in GPUS]
    shares = [max(waits), fmean(waits), 1 - busy[MESH, 256] / total[MESH, 256]]
    shares += [max(saved), fmean(saved), 1 - moved[MESH, 256] / moved[MESH, 32]]
    return [100 * share for share in shares]


def mfu(seconds: float, ranks: int, length: int, causal: bool, peak: float) -> float:
    """Percent: three times the operations of the forward pass."""
    forward = 4 * length**2 * HEADS * HEAD_DIM / (2 if causal else 1)
    return 100 * 3 * forward / (seconds * ranks * peak * 1e12)


def predict(table: str, cluster: Cluster, wanted: Wanted = everything) -> list[float | None]:
    if table == "table_2":
        return _table_2()
    if table == "figure_8":
        return _figure_8(cluster)
    if table == "figure_9":
        return _figure_9(cluster)

    def value(cell: Cell) -> float:
        case = _case(cell.row, cell.column)
        if table == "table_5":
            return peak_memory(cluster, *case, backward=cell.column.endswith("backward"))
        if table == "table_3":
            return 100 / time(cluster, *case)
        return mfu(time(cluster, *case), *case[1:], cluster.device.peak_TFLOP_s)

    return cell_by_cell("mesh_attention", table, value, wanted)


def command(table: str, row: str, column: str) -> str:
    """Of Tables 3 to 5; the others follow from plans, or from several runs. A tile by the default rule."""
    if table not in ("table_3", "table_4"):
        return ""
    system, ranks, length, causal = _case(row, column)
    return attention_command(ranks, f"{system}:layout=cyclic", length, HEADS, HEADS, HEAD_DIM, causal)
