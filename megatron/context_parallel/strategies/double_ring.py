"""Double-Ring-Attention (LoongTrain, section 4.3 and Algorithm 2), the context part of `loongtrain`.

The n ranks are n/w inner rings of w neighbours; rank i·w + j is the paper's W_ij. In round o inner ring i works on
the keys and values of inner ring i-o, which circle among its w ranks, while each rank already passes the chunk it
began the round with to the next inner ring: on a channel of its own, so that both transfers really are concurrent.

Backward, gradients are summed along the same ways, one step (inner) and one round (outer) behind: first inside an
inner ring, to where the chunk entered it, then from ring to ring and home. The paper leaves this to its readers.
Volume received per rank is that of a ring for every w: forward 2(n-1) units, backward 4(n-1).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from ..errors import UsageError
from ..mask import Pairs, rotated
from ..plan.ir import Attend, Comm, Step
from .registry import register
from .ring import gradients, keys


@register("loongtrain", layouts=("zigzag", "cyclic", "contiguous"), options=("inner_ring_size",))
def double_ring(r: int, n: int, sees: Pairs, backward: bool, *, inner_ring_size: int | None = None) -> tuple[Step, ...]:
    """Steps of rank r of n, with inner rings of `inner_ring_size` (w) ranks; default: the most square."""
    w = _inner(n, inner_ring_size)
    rings, (i, j) = n // w, divmod(r, w)
    needs = partial(_needs, sees, w)

    def outer_stops(ring: int) -> int:
        """How many inner rings the chunk of rank j of `ring` visits."""
        return 1 + max(0, (sees.seen_from(ring * w, ring * w + j).bit_length() - 1) // w)

    def inner(hops: Callable, o: int, s: int) -> Iterable[Comm]:
        """A ring's operations of step s between the ranks of this inner ring, on the chunks of round o."""
        first = (i - o) % rings * w
        hops_here = hops(j, s, w, lambda place: needs(i, first + place) if 0 <= o < rings else 0)
        return (replace(op, chunk=first + op.chunk, peer=i * w + op.peer, channel="inner") for op in hops_here)

    def outer(hops: Callable, o: int) -> Iterable[Comm]:
        """A ring's operations of round o between the inner rings."""
        hops_here = hops(i, o, rings, outer_stops)
        return (replace(op, chunk=op.chunk * w + j, peer=op.peer * w + j, channel="outer") for op in hops_here)

    steps = []
    for o in range(rings + 1):  # the last round only brings gradients home
        for m in range(w):
            comm = [*inner(keys, o, m)]
            if backward:
                comm += inner(gradients, o, m) if m else inner(gradients, o - 1, w)
            if m == 0:
                comm += outer(keys, o)
            if backward and m == min(1, w - 1):  # the sum of round o-1 is back where its chunk entered the inner ring
                comm += outer(gradients, o)
            chunk = (i - o) % rings * w + (j - m) % w
            computes = o < rings and sees(r, chunk)
            steps.append(Step(tuple(comm), (Attend((r,), (chunk,)),) if computes else ()))
    return tuple(step for step in steps if step.comm or step.attend)


def _needs(sees: Pairs, w: int, ring: int, chunk: int) -> int:
    """How many ranks of an inner ring the chunk visits, from where it enters to the last whose queries see it."""
    members = sees.columns[chunk] >> ring * w & (1 << w) - 1
    return rotated(members, chunk % w, w).bit_length()


def _inner(n: int, size: int | None) -> int:
    sizes = [w for w in range(1, n + 1) if n % w == 0]
    if size is None:
        return max(w for w in sizes if w <= math.isqrt(n))
    if size not in sizes:
        raise UsageError(f"--cp-inner-ring-size {size}: does not divide {n} context ranks; give {_one_of(sizes)}")
    return size


def _one_of(values: Iterable[int]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
