"""Checks a plan before anyone runs it, and counts what it costs."""

from collections import Counter
from dataclasses import dataclass

from .ir import PARTIAL, Key, Plan, PlanError, Recv, T
from .liveness import last_reads, peak
from .trace import trace
from .volume import received


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


def verify(plan: Plan, kv_ratio: float = 1.0) -> Report:
    """Proves that `plan` computes exact attention and terminates, and counts its costs.

    `kv_ratio` is `plan.kv_ratio(heads, kv_heads)`.

    Every unmasked pair of chunks is computed exactly once and reaches the owner of its result, every send meets its
    receive in order, nobody waits in a circle, no partial is left behind. Under a full mask nothing received goes
    unused; under others a strategy may move what some ranks do not need.

    Raises:
        PlanError: naming rank, step and chunk of the first violation found.
    """
    run = trace(plan)
    for r, held in enumerate(run.held):
        for tensor, chunk in held:
            if tensor in PARTIAL and chunk != r:
                raise PlanError(f"rank {r}, step {len(plan.steps[r])}: partial {tensor} chunk {chunk} is left behind")
        for tensor in plan.ends:
            _check_complete(plan, r, tensor, held.get((tensor, r), 0))
        if plan.sees.full:
            _check_used(plan, r, last_reads(plan, r))
    busy = sum(span.end - span.start for span in run.spans if not span.channel)
    return Report(
        volume=tuple(received(plan, plan.grid.rank(context=r), kv_ratio) for r in range(plan.n)),
        steps=max(len(steps) for steps in plan.steps),
        idle=1 - busy / (plan.n * run.finish) if run.finish else 0.0,
        peak=tuple(peak(plan, r, kv_ratio) for r in range(plan.n)),
    )


def _check_complete(plan: Plan, r: int, tensor: T, value: int) -> None:
    missing = (plan.sees.columns if tensor is T.DKV else plan.sees.rows)[r] & ~value
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
