"""All-gather attention (Llama 3, section 3.3.2): gather all keys and values, attend, reduce-scatter their gradients.

The rank computes its own block during the gather. Units received per rank: forward 2(n-1), backward 4(n-1).
"""

from collections.abc import Iterator

from megatron.context_parallel.plan.ir import AllGather, Attend, ReduceScatter, Step, T

from .registry import Pass, register


@register("allgather", layouts=("zigzag", "cyclic", "contiguous"), channels=("gather",), period=1)
def allgather(at: Pass) -> Iterator[Step]:
    everyone = tuple(range(at.n))
    own = (at.rank,)
    if at.n == 1:
        yield Step(attend=(Attend(own, own),))
        return
    yield Step((AllGather(T.KV, everyone, everyone),), (Attend(own, own),))
    seen = tuple(c for c in everyone if c != at.rank and at.visible_pairs(at.rank, c))
    yield Step(attend=(Attend(own, seen),))
    if at.backward:
        yield Step((ReduceScatter(T.DKV, everyone, everyone),))
