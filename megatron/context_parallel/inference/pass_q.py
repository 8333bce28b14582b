"""Ring pass-Q as in the paper: queries move around the ring, and an all-to-all returns partial outputs at the end.

Algorithm 3 of Yang et al., Context Parallelism for Scalable Million-Token Inference (2024). For comparison: on a grid
of 1 x n, `attention2d` sends partial outputs right after the queries.
"""

from collections.abc import Iterator

from megatron.context_parallel.plan.ir import Attend, ReduceScatter, Step
from megatron.context_parallel.strategies import Choice, Pass, Ring, Strategy
from megatron.context_parallel.tokens.layout import LAYOUTS


def _write(at: Pass) -> Iterator[Step]:
    circle = Ring(at.rank, at.n)
    everyone = tuple(range(at.n))

    def hop(s: int):
        """Each ring position sends on the s-th queries that it received."""
        return circle.shift(at.query, lambda p: circle.rank(p + s), by=-1) if s + 1 < at.n else ()

    for s in range(at.n):
        yield Step(hop(s), (Attend((circle.rank(at.rank + s),), (at.rank,)),))
    if at.n > 1:
        yield Step((ReduceScatter(at.result, everyone, everyone, circle.channel),))


RING_PASS_Q = Choice(Strategy("pass-q", tuple(LAYOUTS), _write, {}, ("ring",)))
