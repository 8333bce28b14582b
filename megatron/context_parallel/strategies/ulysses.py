"""Head parallelism: DeepSpeed Ulysses, and USP, which puts a ring inside it.

The exchange of heads itself is not written here: every strategy has it through `--cp-head-parallel-size`
(`Strategy.plan`). In a `ulysses` group each rank computes the whole sequence for its heads and nothing more travels.
Volume received per rank, MHA: forward 4(n-1)/n units, backward the same.
"""

from ..mask import Pairs
from ..plan.ir import Attend, Step
from .registry import register
from .ring import ring


@register("ulysses", layouts=("contiguous", "zigzag", "cyclic"), all_heads=True)
def ulysses(r: int, n: int, sees: Pairs, backward: bool) -> tuple[Step, ...]:
    """The only step of the only rank: its heads of the whole sequence."""
    return (Step(attend=(Attend((0,), (0,)),)),)


usp = register("usp", layouts=ring.layouts)(ring.rank_steps)
