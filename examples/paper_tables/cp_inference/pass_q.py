"""Ring pass-Q as the paper runs it (Algorithm 3): queries go round a ring, then partial outputs go home all at once.

`attention2d` on a grid of 1 x n sends each partial output on beside the next queries; here nothing hides the exchange.
"""

from collections.abc import Iterator
from functools import partial

from megatron.context_parallel.plan.ir import Attend, Recv, Send, Step, T
from megatron.context_parallel.strategies.messages import Ring
from megatron.context_parallel.strategies.registry import Pass, register


@register("paper_pass_q", layouts=("zigzag", "cyclic"), channels=("ring", "exchange"))
def paper_pass_q(at: Pass) -> Iterator[Step]:
    """Forward only."""
    circle = Ring(at.rank, at.n)
    for s in range(at.n):
        onward = circle.shift(T.Q, partial(_here, circle, s)) if s + 1 < at.n else ()
        yield Step(onward, (Attend((_here(circle, s, at.rank),), (at.rank,)),))
    others = [circle.rank(at.rank + i) for i in range(1, at.n)]
    sends = tuple(Send(T.O, other, other, "exchange") for other in others)
    yield Step(sends + tuple(Recv(T.O, at.rank, other, "exchange") for other in others))


def _here(circle: Ring, step: int, place: int) -> int:
    """The chunk of queries at a place."""
    return circle.rank(place - step)
