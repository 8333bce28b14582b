"""All-gather attention (Llama 3, section 3.3.2): gather all keys and values, attend, reduce-scatter their gradients.

The rank's own block is computed while the gather flies. Volume received per rank: forward 2(n-1) units, backward
4(n-1).
"""

from ..mask import Pairs
from ..plan.ir import AllGather, Attend, ReduceScatter, Step, T
from .registry import register


@register("allgather", layouts=("zigzag", "cyclic", "contiguous"))
def allgather(r: int, n: int, sees: Pairs, backward: bool) -> tuple[Step, ...]:
    """Steps of rank r of n."""
    everyone = tuple(range(n))
    others = tuple(c for c in everyone if c != r and sees(r, c))
    if n == 1:
        return (Step(attend=(Attend((0,), (0,)),)),)
    steps = [Step((AllGather(T.KV, everyone, everyone),), (Attend((r,), (r,)),))]
    if others:
        steps.append(Step(attend=(Attend((r,), others),)))
    if backward:
        steps.append(Step((ReduceScatter(T.DKV, everyone, everyone),)))
    return tuple(steps)
