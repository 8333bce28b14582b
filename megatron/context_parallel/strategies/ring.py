"""Ring attention: queries stay, keys and values move around a ring (Liu et al. 2023; the baseline of all five papers).

Chunk c starts on rank c and visits ranks c, c+1, ... So in step s rank r has chunk r-s. The chunk stops at the last
rank whose queries see it. In the contiguous layout this is rank n-1 with a causal mask, and rank c+1 with a window as
long as a chunk.

In the backward pass, the gradient of chunk c is accumulated along the same path, one step later, and the last rank
sends it to the owner. Units received per rank: forward 2(n-1), backward 4(n-1).
"""

from collections.abc import Callable, Iterator

from megatron.context_parallel.plan.ir import Attend, Comm, Step, T

from .messages import Ring
from .registry import Pass, register

OfStart = Callable[[int], int]  # of the chunk that starts at a ring position: its number, or how many ranks it visits


@register("ring", layouts=("zigzag", "cyclic", "contiguous"), period=1)
def ring(at: Pass) -> Iterator[Step]:
    circle = Ring(at.rank, at.n)
    stops = at.visible_pairs.stops.__getitem__
    for s in range(at.n):
        back = gradients(circle, s, stops, circle.rank) if at.backward else ()
        yield Step(keys(circle, s, stops, circle.rank) + back, (Attend((at.rank,), (circle.rank(at.rank - s),)),))
    if at.backward:
        yield Step(gradients(circle, at.n, stops, circle.rank))


def keys(circle: Ring, s: int, stops: OfStart, chunk: OfStart) -> tuple[Comm, ...]:
    """Step s of keys and values: each position sends on the chunk it computes with, which started s positions back."""

    def onward(place: int) -> int | None:
        began = (place - s) % circle.size
        return chunk(began) if s + 1 < stops(began) else None

    return circle.shift(T.KV, onward)


def gradients(circle: Ring, s: int, stops: OfStart, chunk: OfStart) -> tuple[Comm, ...]:
    """Step s of their gradients: each position sends on the sum of step s-1, or returns it to its owner.

    The owner keeps its own contribution.
    """
    if s < 2:
        return ()

    def onward(place: int) -> int | None:
        began = (place - s + 1) % circle.size
        return chunk(began) if s < stops(began) else None

    def home(place: int) -> int | None:
        began = (place - s + 1) % circle.size
        return chunk(began) if s == stops(began) else None

    return circle.shift(T.DKV, onward) + circle.shift(T.DKV, home, by=1 - s)
