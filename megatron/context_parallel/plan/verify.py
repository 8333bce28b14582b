"""Checks a plan before anyone runs it, and counts what it costs."""

from collections import Counter
from dataclasses import dataclass

from .ir import PARTIAL, Key, Plan, PlanError, Recv, T
from .liveness import last_reads, peak
from .trace import trace
from .volume import received


@dataclass(frozen=True)
class PlanReport:
    """What a verified plan costs. One unit is one chunk of one tensor of model width: Q, K, V and dO are one each.

    Attributes:
        volume: for each rank of the steps, the units received, by tensor. It includes the swaps of heads.
        steps: the largest number of steps of a rank.
        idle: the fraction of time in which ranks compute no block, if a pair of chunks takes one unit of time and
            communication none.
        peak: for each rank, the most units alive at once. It includes the rank's own chunks.
    """

    volume: tuple[Counter, ...]
    steps: int
    idle: float
    peak: tuple[float, ...]

    @property
    def received(self) -> float:
        """Units that the busiest rank receives."""
        return max(sum(v.values()) for v in self.volume)


def verify(plan: Plan, kv_ratio: float = 1.0) -> PlanReport:
    """Proves that `plan` computes exact attention and ends, and counts its costs.

    Each pair of chunks that the mask leaves is computed exactly once, and its result reaches its owner. Each send meets
    its receive in order. There is no deadlock. No partial is left behind. Under a full mask each received chunk is
    used; under other masks a strategy may send chunks that some ranks do not need.

    Args:
        plan: the plan.
        kv_ratio: for the costs, `plan.kv_ratio(heads, kv_heads)`.

    Raises:
        PlanError: names rank, step and chunk of the first thing that is wrong.
    """
    run = trace(plan)
    for r, held in enumerate(run.held):
        for tensor, chunk in held:
            if tensor in PARTIAL and chunk != r:
                raise PlanError(f"rank {r}, step {len(plan.steps[r])}: partial {tensor} chunk {chunk} is left behind")
        for tensor in plan.ends:
            _check_complete(plan, r, tensor, held.get((tensor, r), 0))
        if plan.visible_pairs.full:
            _check_used(plan, r, last_reads(plan, r))
    busy = sum(span.end - span.start for span in run.spans if not span.channel)
    return PlanReport(
        volume=tuple(received(plan, plan.grid.rank(context=r), kv_ratio) for r in range(plan.n)),
        steps=max(len(steps) for steps in plan.steps),
        idle=1 - busy / (plan.n * run.finish) if run.finish else 0.0,
        peak=tuple(peak(plan, r, kv_ratio) for r in range(plan.n)),
    )


def _check_complete(plan: Plan, r: int, tensor: T, value: int) -> None:
    missing = (plan.visible_pairs.columns if tensor is T.DKV else plan.visible_pairs.rows)[r] & ~value
    if missing:
        first = (missing & -missing).bit_length() - 1
        raise PlanError(
            f"rank {r}, step {len(plan.steps[r])}: {tensor} chunk {r} ends without the block of chunk {first}"
        )


def _check_used(plan: Plan, r: int, last: dict[Key, int]) -> None:
    for s, step in enumerate(plan.steps[r]):
        for op in step.comm:
            if isinstance(op, Recv) and op.tensor not in PARTIAL and last.get((op.tensor, op.chunk), -1) < s:
                raise PlanError(f"rank {r}, step {s}: {op.tensor} chunk {op.chunk} is received but never used")
