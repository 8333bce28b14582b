"""Double-Ring-Attention (LoongTrain, section 4.3 and Algorithm 2), the context part of `loongtrain`.

The n ranks form n/w inner rings of w neighbours. Rank i·w + j is the paper's W_ij. In round o, inner ring i works on
the keys and values of inner ring i-o, which move around its w ranks. Meanwhile each rank sends the chunk with which it
began the round to the next inner ring. This uses a separate channel, so both transfers are concurrent.

The paper gives no backward pass. Here gradients are accumulated along the same paths, one step (inner) and one round
(outer) later: first inside an inner ring, to the rank where the chunk entered it, then from ring to ring to the owner.
Units received per rank are those of a ring for every w: forward 2(n-1), backward 4(n-1).
"""

import math
from collections.abc import Callable, Iterator
from typing import Annotated

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import Option, divisors
from megatron.context_parallel.plan.ir import Attend, Comm, Step
from megatron.context_parallel.tokens.chunk_pairs import rotated

from .messages import Ring
from .registry import Pass, register
from .ring import gradients, keys

Hops = Callable[..., tuple[Comm, ...]]  # `keys` or `gradients`


def _inner_ring(at: Pass, inner_ring_size: int | None = None) -> int:
    return _inner(at.n, inner_ring_size)


@register("loongtrain", layouts=("zigzag", "cyclic", "contiguous"), channels=("inner", "outer"), period=_inner_ring)
def double_ring(
    at: Pass,
    *,
    inner_ring_size: Annotated[
        int | None,
        Option(
            "number of ranks of an inner ring; default: the most square split", 4, tries=lambda n, _: divisors(n)[1:-1]
        ),
    ] = None,
) -> Iterator[Step]:
    w = _inner(at.n, inner_ring_size)
    visible_pairs = at.visible_pairs
    rings = at.n // w
    i, j = divmod(at.rank, w)
    inner, outer = Ring(j, w, i * w, channel="inner"), Ring(i, rings, j, w, channel="outer")

    def around(hops: Hops, o: int) -> tuple[Comm, ...]:
        """Round o between the inner rings: a chunk is sent on until the last ring that sees it."""
        return hops(outer, o, lambda ring: rings_seeing(ring * w + j), outer.rank)

    def rings_seeing(chunk: int) -> int:
        home = chunk // w * w
        return 1 + max(0, (visible_pairs.seen_from(home, chunk).bit_length() - 1) // w)

    def within(hops: Hops, o: int, s: int) -> tuple[Comm, ...]:
        """Step s of round o inside this inner ring."""
        first = (i - o) % rings * w

        def ranks_seeing(place: int) -> int:
            members = visible_pairs.columns[first + place] >> i * w & (1 << w) - 1
            return rotated(members, place, w).bit_length()

        return hops(inner, s, ranks_seeing, lambda place: first + place) if 0 <= o < rings else ()

    for o in range(rings + 1):  # the last round only returns gradients to their owners
        for s in range(w):
            comm = within(keys, o, s)
            if at.backward:
                comm += within(gradients, o, s) if s else within(gradients, o - 1, w)
            if s == 0:
                comm += around(keys, o)
            if at.backward and s == min(1, w - 1):  # the sum of round o-1 is back where its chunk entered
                comm += around(gradients, o)
            chunk = (i - o) % rings * w + (j - s) % w
            yield Step(comm, (Attend((at.rank,), (chunk,)),) if o < rings else ())


def _inner(n: int, size: int | None) -> int:
    sizes = divisors(n)
    if size is None:
        return max(w for w in sizes if w <= math.isqrt(n))
    if size not in sizes:
        fits = ", ".join(map(str, sizes))
        raise UsageError(f"--cp-inner-ring-size {size}: does not divide {n} context ranks; give one of {fits}")
    return size
