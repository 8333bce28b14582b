"""Checks a plan before anyone runs it, and counts what it costs."""

from collections import Counter
from dataclasses import dataclass

from .ir import PARTIAL, AllGather, Attend, Comm, Plan, PlanError, Recv, ReduceScatter, Send, SwapHeads, T
from .machine import contributions
from .trace import trace


@dataclass(frozen=True)
class Report:
    """What a verified plan costs. Units: one chunk of one tensor of model width; K, V, Q, dO count one each.

    Attributes:
        volume: per rank of the steps, units received, by tensor; the swap of heads counts too.
        steps: the longest rank's number of steps.
        idle: fraction of rank time not spent in blocks if a pair of chunks takes one unit of time and
            communication none.
        peak: per rank, the most units alive at once, the rank's own included.
    """

    volume: tuple[Counter, ...]
    steps: int
    idle: float
    peak: tuple[float, ...]

    @property
    def received(self) -> float:
        """Units received by the rank that receives most."""
        return max(sum(v.values()) for v in self.volume)


def units(tensor: T, kv_ratio: float = 1.0) -> float:
    """Units of one chunk of `tensor`; log-sum-exp and delta are not counted. `kv_ratio`: key/value heads a head."""
    return {T.Q: 1, T.KV: 2 * kv_ratio, T.O: 1, T.QDO: 2, T.DO: 1, T.DQ: 1, T.DKV: 2 * kv_ratio}[tensor]


def traffic(op: Comm | SwapHeads, kv_ratio: float = 1.0) -> Counter:
    """Units an operation brings to its rank, by tensor. A reduce-scatter is an exchange followed by a local sum."""
    match op:
        case Recv():
            return Counter({op.tensor: units(op.tensor, kv_ratio)})
        case AllGather() | ReduceScatter():
            return Counter({op.tensor: units(op.tensor, kv_ratio) * (len(op.group) - 1)})
        case SwapHeads():
            return Counter({t: units(t, kv_ratio) * (op.size - 1) / op.size for t in op.tensors})
    return Counter()


def received(op: Comm | SwapHeads, kv_ratio: float = 1.0) -> float:
    """Units an operation brings to its rank."""
    return sum(traffic(op, kv_ratio).values())


def received_bytes(plan: Plan, tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes the busiest rank receives, for `tokens` of a rank (times batch); log-sum-exp and delta are not counted.

    Queries, keys and values travel in the model's dtype of `itemsize` bytes, partial results in float32.
    """
    kv_ratio = plan.kv_ratio(heads, kv_heads)

    def size(op: Comm | SwapHeads) -> float:
        partial = PARTIAL
        if isinstance(op, SwapHeads):  # what comes home is whole, unless key/value heads were replicated
            partial = {T.DKV} if plan.heads > kv_heads else set()
        return sum(u * (4 if t in partial else itemsize) for t, u in traffic(op, kv_ratio).items())

    swaps = sum(size(op) for op in (*plan.before, *plan.after))
    busiest = max(sum(size(op) for step in steps for op in step.comm) for steps in plan.steps)
    return round(tokens * heads * head_dim * (swaps + busiest))


def verify(plan: Plan, kv_ratio: float = 1.0) -> Report:
    """Proves that `plan` computes exact attention and terminates, and counts its costs.

    `kv_ratio` is `plan.kv_ratio(heads, kv_heads)`.

    Every unmasked pair of chunks is computed exactly once and reaches the owner of its result, every send meets its
    receive in order, nobody waits in a circle, nothing received goes unused and no partial is left behind.

    Raises:
        PlanError: naming rank, step and chunk of the first violation found.
    """
    run = trace(plan)
    reads = [last_reads(plan, r) for r in range(plan.n)]
    for r, held in enumerate(run.held):
        for tensor, chunk in held:
            if tensor in PARTIAL and chunk != r:
                raise PlanError(f"rank {r}, step {len(plan.steps[r])}: partial {tensor} chunk {chunk} is left behind")
        for tensor in plan.ends:
            _check_complete(plan, r, tensor, held.get((tensor, r), 0))
        _check_used(plan, r, reads[r])
    busy = sum(span.end - span.start for span in run.spans if not span.channel)
    swaps = (*plan.before, *plan.after)
    volume = tuple(
        sum((traffic(op, kv_ratio) for op in (*(op for s in steps for op in s.comm), *swaps)), Counter())
        for steps in plan.steps
    )
    return Report(
        volume=volume,
        steps=max(len(steps) for steps in plan.steps),
        idle=1 - busy / (plan.n * run.finish) if run.finish else 0.0,
        peak=tuple(_peak(plan, r, reads[r], kv_ratio) for r in range(plan.n)),
    )


def _check_complete(plan: Plan, r: int, tensor: T, value: int) -> None:
    missing = (plan.sees.columns if tensor is T.DKV else plan.sees.rows)[r] & ~value
    if missing:
        first = (missing & -missing).bit_length() - 1
        raise PlanError(
            f"rank {r}, step {len(plan.steps[r])}: {tensor} chunk {r} ends without the block of chunk {first}"
        )


def _reads(op: Comm | Attend, plan: Plan, r: int) -> list[tuple[T, int]]:
    match op:
        case Attend():
            return [(plan.starts[0], c) for c in op.q_chunks] + [(plan.starts[1], c) for c in op.kv_chunks]
        case Send():
            return [(op.tensor, op.chunk)]
        case AllGather():
            return [(op.tensor, op.chunks[op.group.index(r)])]
        case ReduceScatter():
            return [(op.tensor, c) for c in op.chunks]
    return []


def last_reads(plan: Plan, r: int) -> dict[tuple[T, int], int]:
    """The last step in which rank r reads each travelling chunk: after it, a received copy can be freed."""
    return {
        key: s
        for s, step in enumerate(plan.steps[r])
        for op in (*step.comm, *step.attend)
        for key in _reads(op, plan, r)
    }


def _check_used(plan: Plan, r: int, last: dict[tuple[T, int], int]) -> None:
    for s, step in enumerate(plan.steps[r]):
        for op in step.comm:
            if isinstance(op, Recv) and op.tensor not in PARTIAL and last.get((op.tensor, op.chunk), -1) < s:
                raise PlanError(f"rank {r}, step {s}: {op.tensor} chunk {op.chunk} is received but never used")


def _peak(plan: Plan, r: int, last: dict[tuple[T, int], int], kv_ratio: float) -> float:
    """Most units alive in any step: own inputs always, copies until their last read, partials until they leave."""
    end = max(0, len(plan.steps[r]) - 1)
    alive: list[tuple[T, int, int]] = [(t, 0, end) for t in plan.starts]
    partial: dict[tuple[T, int], int] = {}
    for s, step in enumerate(plan.steps[r]):
        for op in step.comm:
            for key in _reads(op, plan, r):
                if key in partial:
                    alive.append((key[0], partial.pop(key), s))
            match op:
                case Recv() if op.tensor in PARTIAL:
                    alive.append((op.tensor, s, s))
                    partial.setdefault((op.tensor, op.chunk), s)
                case Recv():
                    alive.append((op.tensor, s, last.get((op.tensor, op.chunk), s)))
                case AllGather():
                    others = [c for rank, c in zip(op.group, op.chunks, strict=True) if rank != r]
                    alive += [(op.tensor, s, max(s, last.get((op.tensor, c), s))) for c in others]
                case ReduceScatter():
                    alive += [(op.tensor, s, s)] * (len(op.group) - 1)
                    partial[op.tensor, op.chunks[op.group.index(r)]] = s
        for attend in step.attend:
            for q, kv in contributions(attend, plan):
                for tensor, chunk in zip(plan.ends, (q, kv), strict=False):
                    partial.setdefault((tensor, chunk), s)
    alive += [(tensor, s, end) for (tensor, _), s in partial.items()]
    change: list[Counter] = [Counter() for _ in range(end + 2)]
    for tensor, first, final in alive:
        change[first][tensor] += 1
        change[final + 1][tensor] -= 1
    now, peaks = Counter(), []
    for changed in change:
        now.update(changed)
        peaks.append(sum(units(t, kv_ratio) * count for t, count in now.items()))
    for swap, there in ((plan.before, plan.starts), (plan.after, (*plan.starts, *plan.ends))):  # and the copies sent
        peaks += [sum(units(t, kv_ratio) for t in (*there, *op.tensors)) for op in swap]
    return max(peaks)
