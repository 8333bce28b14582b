"""Verifies a plan before it runs, and counts its costs."""

from collections import Counter
from dataclasses import dataclass

from .ir import PARTIAL, Key, Plan, PlanError, Recv, T
from .liveness import last_reads, peak
from .repeats import check_period
from .trace import trace
from .volume import received


@dataclass(frozen=True)
class PlanReport:
    """The costs of a verified plan. One unit is one chunk of one tensor of model width: Q, K, V and dO are one each.

    Attributes:
        volume: for each rank of the steps, the units received, by tensor, including head swaps.
        steps: the maximum number of steps of a rank.
        idle: the fraction of time in which ranks compute no block, if a pair of chunks takes one unit of time and
            communication takes none.
        peak: for each rank, the maximum units alive at once, including the rank's own chunks.
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
    """Proves that `plan` computes exact attention and terminates, and counts its costs.

    Each pair of chunks that the mask does not empty is computed exactly once, and its result reaches its owner. Sends
    match receives in order. There is no deadlock. No partial is lost. The steps repeat after the period that a strategy
    declares. Under a full mask each received chunk is used; under other masks a strategy may send chunks that some
    ranks do not need.

    Args:
        plan: the plan.
        kv_ratio: for the costs, `plan.kv_ratio(heads, kv_heads)`.

    Raises:
        PlanError: the message names rank, step and chunk of the first error.
    """
    run = trace(plan)
    for r, held in enumerate(run.held):
        for tensor, chunk in held:
            if tensor in PARTIAL and chunk != r:
                what = f"partial {tensor} chunk {chunk} is never sent to its owner, rank {chunk}"
                raise PlanError(f"rank {r}, step {len(plan.steps[r])}: {what}")
        for tensor in plan.results:
            _check_complete(plan, r, tensor, held.get((tensor, r), 0))
        if plan.visible_pairs.full:
            _check_used(plan, r, last_reads(plan, r))
    check_period(plan)
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
