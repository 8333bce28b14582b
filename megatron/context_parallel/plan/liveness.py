"""How long a rank needs each chunk, and its peak memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from .ir import PARTIAL, Key, Plan, ReduceScatter, T
from .volume import Shape, chunk_bytes, units


def last_reads(plan: Plan, r: int) -> dict[Key, int]:
    """The last step in which rank r reads each chunk. After it, a received copy can be freed."""
    last: dict[Key, int] = {}
    for s, step in enumerate(plan.steps[r]):
        read = [key for op in step.comm for key in op.reads(r)]
        read += [key for attend in step.attend for key in attend.reads(plan.backward)]
        last.update(dict.fromkeys(read, s))
    return last


def peak(plan: Plan, r: int, kv_ratio: float = 1.0) -> float:
    """Peak units alive in a step: own inputs always, copies until their last read, partials until they are sent.

    With several rounds, also the tensors of the rank's own tokens for all heads, and those of two swaps in flight.
    """
    own = sum(units(t, kv_ratio) for t in (*plan.inputs, *plan.results))
    return _peak(plan, r, lambda tensor, swap: units(tensor, kv_ratio) / plan.head_rounds, own)


def peak_bytes(plan: Plan, r: int, shape: Shape, work: Sequence[float] = ()) -> int:
    """The same in bytes, with log-sum-exp and delta, and partials in float32, also those that are sent in 16 bits.

    `work`: bytes that a kernel needs in each step besides.
    """
    whole = replace(plan, head_rounds=1)
    own = sum(chunk_bytes(whole, t, shape, True) for t in (*plan.inputs, *plan.results))
    return round(_peak(plan, r, lambda tensor, swap: chunk_bytes(plan, tensor, shape, swap, sent=False), own, work))


def _peak(plan: Plan, r: int, size: Callable[[T, bool], float], own: float, work: Sequence[float] = ()) -> float:
    sizes = {t: size(t, False) for t in T}
    change = [0.0] * (len(plan.steps[r]) + 2)
    for tensor, first, final in _alive(plan, r):
        change[first] += sizes[tensor]
        change[final + 1] -= sizes[tensor]
    if plan.rounds_overlap:  # the results of the round before, until the first block is computed
        first = next((s for s, step in enumerate(plan.steps[r]) if step.attend), 0)
        results = sum(sizes[t] for t in plan.results)
        change[0] += results
        change[first + 1] -= results
    peaks = [*accumulate(change)]
    for s, needed in enumerate(work):
        peaks[s] += needed
    for swap, there in ((plan.swaps_before, plan.inputs), (plan.swaps_after, (*plan.inputs, *plan.results))):
        for op in swap:
            copies = sum(size(t, True) for t in op.tensors)
            peaks.append(sum(sizes[t] for t in there) + copies)
    if plan.head_rounds == 1:
        return max(peaks)
    swapped = sum(size(t, True) for op in plan.swaps for t in op.tensors)
    return own + max(peaks) + swapped


def _alive(plan: Plan, r: int) -> list[tuple[T, int, int]]:
    """Each value that rank r holds: its tensor, and the first and the last step in which it is alive."""
    last = last_reads(plan, r)
    end = max(0, len(plan.steps[r]) - 1)
    alive: list[tuple[T, int, int]] = [(t, 0, end) for t in plan.inputs]
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
                for tensor, chunk in zip(plan.results, (q, kv), strict=False):
                    partial.setdefault((tensor, chunk), s)
    return alive + [(tensor, s, end) for (tensor, _), s in partial.items()]
