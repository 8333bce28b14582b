"""How long a rank needs each chunk, and how much it holds at most."""

from collections.abc import Callable
from itertools import accumulate

from .ir import PARTIAL, Key, Plan, ReduceScatter, T
from .volume import Shape, chunk_bytes, units


def last_reads(plan: Plan, r: int) -> dict[Key, int]:
    """The last step in which rank r reads each chunk. After it, a received copy can be freed."""
    return {
        key: s
        for s, step in enumerate(plan.steps[r])
        for keys in (*(op.reads(r) for op in step.comm), *(a.reads(plan.backward) for a in step.attend))
        for key in keys
    }


def peak(plan: Plan, r: int, kv_ratio: float = 1.0) -> float:
    """The most units alive in a step: own inputs always, copies until their last read, partials until they leave."""
    return _peak(plan, r, lambda tensor, swap: units(tensor, kv_ratio))


def peak_bytes(plan: Plan, r: int, shape: Shape) -> int:
    """The same in bytes, with log-sum-exp and delta, and partials in float32."""
    return round(_peak(plan, r, lambda tensor, swap: chunk_bytes(plan, tensor, shape, swap)))


def _peak(plan: Plan, r: int, size: Callable[[T, bool], float]) -> float:
    last, end = last_reads(plan, r), max(0, len(plan.steps[r]) - 1)
    alive: list[tuple[T, int, int]] = [(t, 0, end) for t in plan.starts]
    partial: dict[Key, int] = {}
    for s, step in enumerate(plan.steps[r]):
        for op in step.comm:
            for key in op.reads(r):
                if key in partial:
                    alive.append((key[0], partial.pop(key), s))
            if op.tensor in PARTIAL:
                count = len(op.group) - 1 if isinstance(op, ReduceScatter) else 1
                for key in op.brings(r):
                    alive += [(op.tensor, s, s)] * count
                    partial.setdefault(key, s)
            else:
                alive += [(op.tensor, s, max(s, last.get(key, s))) for key in op.brings(r)]
        for attend in step.attend:
            for q, kv in attend.pairs(plan.visible_pairs):
                for tensor, chunk in zip(plan.ends, (q, kv), strict=False):
                    partial.setdefault((tensor, chunk), s)
    alive += [(tensor, s, end) for (tensor, _), s in partial.items()]
    sizes, change = {t: size(t, False) for t in T}, [0.0] * (end + 2)
    for tensor, first, final in alive:
        change[first] += sizes[tensor]
        change[final + 1] -= sizes[tensor]
    peaks = [*accumulate(change)]
    for swap, there in ((plan.before, plan.starts), (plan.after, (*plan.starts, *plan.ends))):  # and the copies sent
        peaks += [sum(sizes[t] for t in there) + sum(size(t, True) for t in op.tensors) for op in swap]
    return max(peaks)
