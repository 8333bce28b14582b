"""Head parallelism: DeepSpeed Ulysses, and USP, which puts a ring inside it.

The head swap is not implemented here: every strategy has it with `--cp-head-parallel-size` (`Strategy.plan`). With
`ulysses` each rank computes the whole sequence for its heads, and nothing else is sent. Units received per rank (MHA):
forward 4(n-1)/n, backward the same.
"""

from collections.abc import Iterator
from typing import Annotated

from megatron.context_parallel.options import Option
from megatron.context_parallel.plan.ir import Attend, Step

from .registry import Pass, register
from .ring import ring


@register(
    "ulysses",
    layouts=("contiguous", "zigzag", "cyclic"),
    channels=(),
    head_parallel="all",
    in_token_rounds=True,
)
def ulysses(
    at: Pass,
    *,
    token_rounds: Annotated[
        int, Option("number of rounds in which a rank swaps and computes its tokens; needs the layout cyclic", 4)
    ] = 1,
) -> Iterator[Step]:
    """`Strategy.plan` gives `token_rounds` to the plan; the block is the same."""
    yield Step(attend=(Attend((0,), (0,)),))


usp = register("usp", layouts=ring.layouts, head_parallel="required", period=ring.period)(ring.write)
