"""The time of a plan on a cluster: the symbolic machine with the cluster's links and devices."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from weakref import WeakKeyDictionary

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.flows import Flows, Task
from megatron.context_parallel.plan.ir import (
    PARTIAL,
    AllGather,
    Attend,
    Comm,
    Plan,
    ReduceScatter,
    Send,
    SwapHeads,
    T,
    Transfer,
)
from megatron.context_parallel.plan.machine import Merge, Overhead
from megatron.context_parallel.plan.row_sets import RowSets
from megatron.context_parallel.plan.trace import Clock, Rank, Span
from megatron.context_parallel.plan.volume import Shape, chunk_bytes
from megatron.context_parallel.tokens.mask import Mask

from .block_time import MANY_RANKS, BlockTime
from .links import Links, Path, period_of_links
from .symmetry import Symmetry, symmetry_of


@dataclass(frozen=True)
class PassForecast:
    """The time of one attention pass.

    Attributes:
        seconds: until the last rank has its result.
        compute: seconds in which the busiest rank computes blocks.
        spans: what happened on each rank that was simulated, of the first group of heads.
        symmetry: the ranks that were simulated, which stand for all.
        ends: seconds until each of them is done.
    """

    seconds: float
    compute: float
    spans: list[Span]
    symmetry: Symmetry
    ends: dict[Rank, float]

    @property
    def exposed(self) -> float:
        """Seconds in which the busiest rank does not compute: communication that its blocks do not hide."""
        return self.seconds - self.compute


def simulate(
    plan: Plan,
    cluster: Cluster,
    shape: Shape,
    mask: Mask | None = None,
    batch: int = 1,
    dtype: str = "bf16",
    devices: Sequence[int] | None = None,
    others: Sequence[Sequence[int]] = (),
    all_up_to: int = MANY_RANKS,
    blocks: Callable[[Attend], float] | None = None,
    rows: RowSets | None = None,
    starts: dict[Rank, float] | None = None,
) -> PassForecast:
    """Predicts one pass on a cluster.

    Args:
        plan: the pass.
        cluster: its devices are counted node by node.
        shape: the sizes on a rank.
        mask: of the attention; default: causal.
        batch: sequences; `shape.rows` counts the tokens of all.
        dtype: of the model, as in the cluster's attention rates.
        devices: the device of each rank; default: all of the cluster, in order.
        others: the devices of other context groups, which run the same pass at the same time (`Links`).
        all_up_to: up to so many ranks each is simulated, and `spans` tell of it.
        blocks: seconds of a block, for all heads; default: a `BlockTime`.
        rows: the rows that are sent; default: whole chunks. Every rank is then simulated.
        starts: seconds until each rank begins, such as the `ends` of the pass before; `seconds` counts them. Every rank
            is then simulated. Default: all begin together.

    Raises:
        UsageError: another number of devices than ranks.
        PlanError: as `trace`.
    """
    devices = devices or range(cluster.ranks)
    if len(devices) != (ranks := plan.all_ranks):
        raise UsageError(f"{cluster.name}: {len(devices)} devices for {ranks} ranks; give {ranks} devices")
    if blocks is None:
        blocks = BlockTime(cluster.device, plan, shape, mask or Mask(), shape.rows * plan.all_ranks // batch, dtype)
    folded = plan.all_ranks > all_up_to and rows is None and starts is None
    symmetry = _symmetry(plan, blocks, period_of_links(cluster, devices)) if folded else Symmetry.none(plan)
    links = Links(cluster, symmetry.representative, devices, others)
    costs = _Costs(plan, shape, blocks, links, symmetry, rows)
    clock = Clock(plan, costs, symmetry.groups, symmetry.ranks, cluster.buffered_sends, starts)
    clock.run()
    busy = [0.0] * symmetry.ranks
    for span in clock.spans:
        busy[span.rank] += span.end - span.start if not span.channel else 0.0
    return PassForecast(clock.flows.now, max(busy), clock.spans, symmetry, clock.ends)


_symmetries: WeakKeyDictionary[Plan, dict[tuple[int, Mask, int], Symmetry]] = WeakKeyDictionary()


def _symmetry(plan: Plan, blocks: Callable[[Attend], float], links: int) -> Symmetry:
    """The ranks that stand for all. Those for a mask are kept, because they are the same on devices of any speed."""
    if not isinstance(blocks, BlockTime):
        return symmetry_of(plan, blocks, links)
    of_plan = _symmetries.setdefault(plan, {})
    key = links, blocks.mask, blocks.length
    if key not in of_plan:
        of_plan[key] = symmetry_of(plan, blocks, links)
    return of_plan[key]


TENSORS = {T.Q: 1, T.KV: 2, T.O: 2, T.QDO: 4, T.DQ: 1, T.DKV: 2}  # of torch, each a message; a swap packs its own


class _Costs:
    def __init__(
        self,
        plan: Plan,
        shape: Shape,
        blocks: Callable[[Attend], float],
        links: Links,
        symmetry: Symmetry,
        rows: RowSets | None,
    ) -> None:
        self.plan, self.shape, self.blocks, self.links, self.symmetry = plan, shape, blocks, links, symmetry
        self.cluster = cluster = links.cluster
        self.rows = rows
        self.flows = Flows((cluster.compute_slowdown, cluster.message_slowdown))
        grid = symmetry.grid
        self.ranks = [grid.along(grid.rank(heads=group), "context") for group in range(symmetry.groups)]
        self.route, self.alone = cache(self._route), cache(Task)  # by seconds
        self.memory = cluster.device.memory_GB_s * 1e9
        self.launches_alike = not cluster.message_us and not plan.partials_in_16_bits
        self.wakes = bool(cluster.shared_cores and cluster.busy_latency_us)
        self.compute_is_shared = bool(cluster.shared_cores or cluster.compute_slowdown or cluster.message_slowdown)
        self.sent_bytes = {(t, swap): chunk_bytes(plan, t, shape, swap) for swap in (False, True) for t in T}
        self.stored_bytes = {t: chunk_bytes(plan, t, shape, False, sent=False) for t in T}

    def block(self, group: int, rank: int, attend: Attend, round_index: int) -> Task:
        plan, blocks = self.plan, self.blocks
        if plan.token_rounds > 1 and isinstance(blocks, BlockTime) and blocks.mask.plain:
            return self._on_rank(group, rank, blocks.of_range(plan.range_of(round_index), plan.token_rounds))
        return self._on_rank(group, rank, attend.share * plan.block_share(round_index) * blocks(attend))

    def overhead(self, group: int, rank: int, work: Overhead) -> Task | None:
        memory = self.memory
        if isinstance(work, Merge):  # reads both partials and writes one, of the rows that arrived
            seconds = work.times * (2 * self.stored_bytes[work.tensor] + self.sent_bytes[work.tensor, False]) / memory
            if self.rows and work.message:
                seconds *= self.rows.share(work.message)
        elif self.launches_alike and not work.first and not work.swap:
            seconds = self.cluster.device.step_us * 1e-6
        else:
            messages = sum([_messages(op) for op in work.comm]) if self.cluster.message_us else 0
            seconds = (self.cluster.device.step_us + self.cluster.message_us * messages) * 1e-6
            if work.swap:
                seconds += self._packing(work.swap)
            if self.plan.partials_in_16_bits:
                seconds += sum([self._rounding(op) for op in work.comm]) / memory
            if work.first:
                seconds += self.cluster.device.pass_us * 1e-6
            moved = 0
            if work.first and self.plan.backward:  # delta reads output and gradient, and writes and reads their product
                moved = 4 * self.sent_bytes[T.DO, True] * self.plan.rounds
            seconds += moved / memory
        return self._on_rank(group, rank, seconds) if seconds else None

    def _packing(self, op: SwapHeads) -> float:
        """Seconds in which a rank packs what it sends in a swap, and unpacks what it receives."""
        device = self.cluster.device
        moved = sum([4 * self.sent_bytes[t, True] for t in op.tensors])
        return device.swap_us * 1e-6 + moved / ((device.packing_GB_s or device.memory_GB_s) * 1e9)

    def _rounding(self, op: Comm | SwapHeads) -> float:
        """Bytes read and written when a rank rounds partials to send them."""
        if not isinstance(op, Send | ReduceScatter) or op.tensor not in PARTIAL:
            return 0.0
        others = len(op.group) - 1 if isinstance(op, ReduceScatter) else 1
        return others * (self.stored_bytes[op.tensor] + self.sent_bytes[op.tensor, False])

    def _on_rank(self, group: int, rank: int, seconds: float) -> Task:
        if not self.compute_is_shared:
            return self.alone(seconds)
        rank = self.ranks[group][rank]
        core = self.flows.resource(("core", rank), 1.0)
        return Task(seconds, (core, self._cores) if self.cluster.shared_cores else (core,), (rank,))

    @cached_property
    def _cores(self) -> int:
        assert self.cluster.shared_cores
        return self.flows.resource("cores", self.cluster.shared_cores * self.symmetry.share / self.links.together)

    def messages(self, group: int, op: Comm | SwapHeads, transfers: Sequence[Transfer]) -> list[tuple[Task, float]]:
        swap = isinstance(op, SwapHeads)
        hops = 1
        if isinstance(op, AllGather):  # libraries pass the chunks on along a ring
            hops = len(op.group) - 1
            transfers = [
                t for t in transfers if op.group.index(t.receiver) == (op.group.index(t.sender) + 1) % (hops + 1)
            ]
        wake = self._wake() if self.wakes else 0.0
        tasks = []
        for t in transfers:
            path, uses, ends, pair = self.route(None if swap else group, t.sender, t.receiver)
            size = self.sent_bytes[t.tensor, swap] * t.share * hops
            if self.rows and not swap:
                size *= self.rows.share(t)
            delay = path.seconds + wake
            tasks.append((Task(size, uses, ends, pair), delay * hops))
            if path.processor and self.cluster.shared_cores:  # at both ends, as fast as the links bring the bytes
                for end, link in zip(ends, (path.links[0], path.links[:2][-1]), strict=True):
                    pace = self.flows.resource(("work", end, link.name), link.rate * path.processor)
                    tasks.append((Task(size * path.processor, (pace, self._cores)), delay))
        return tasks

    def _wake(self) -> float:
        """Seconds until a rank gets a processor that it needs for a message, while others compute on all."""
        cores = self.cluster.shared_cores
        assert cores  # `wakes`
        computing = self.flows.computing(self._cores) / (cores * self.symmetry.share / self.links.together)
        return self.cluster.busy_latency_us * 1e-6 * computing if computing >= 1 else 0.0

    def _route(
        self, group: int | None, sender: int, receiver: int
    ) -> tuple[Path, tuple[int, ...], tuple[int, int], Hashable]:
        """The path, its resources and devices, and the pair of a message between two ranks: of a group, or of all."""
        if group is not None:
            sender, receiver = self.ranks[group][sender], self.ranks[group][receiver]
        path, pair = self.links.path(sender, receiver), self.symmetry.pair(sender, receiver)
        alone = group is None and self.plan.rounds == 1  # swaps of rounds share the links with the steps' messages
        uses = [self.flows.resource((link.name, alone), link.rate, link.crowding, link.groups) for link in path.links]
        if path.stream and group is not None:  # LoongTrain's SeqAlltoAll is faster between two ranks than its rings
            uses.append(self.flows.resource(("stream", pair), path.stream))
        return path, tuple(uses), (self.links.representatives[sender], self.links.representatives[receiver]), pair


def _messages(op: Comm | SwapHeads) -> int:
    """Messages that a rank sends and receives."""
    match op:
        case AllGather():
            return TENSORS[op.tensor]
        case ReduceScatter():
            return 2 * (len(op.group) - 1) * TENSORS[op.tensor]
        case SwapHeads():
            return 2 * (op.size - 1)  # all tensors in one message for each rank
        case _:
            return TENSORS[op.tensor]
