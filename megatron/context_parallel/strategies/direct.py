"""Direct attention: a rank fetches the keys and values that it needs from their owners. For placed documents.

If a batch brings its own placement, a rank sees keys of few others, and only some of their rows. All fetches start at
once, so no rank waits for what another one computes: with documents, blocks of one step take different times on
different ranks. Ranks of the same part of `near` neighbours are near each other, the others are far.

The forward pass computes its own pair while the fetches run, then the near pairs, then the far ones. The backward pass
begins with the near pairs, while far keys arrive. Gradients of near keys return while far pairs are computed, and those
of far keys while the own pair is. So the near fetch is not hidden, which is the shortest message.

Units received with all pairs visible: forward 2(n-1), backward 4(n-1). All fetched chunks are alive at once.
"""

from collections.abc import Iterator
from typing import Annotated

from megatron.context_parallel.options import Option
from megatron.context_parallel.plan.ir import Attend, Comm, Recv, Send, Step, T

from .registry import Pass, register

NEAR, FAR = "near", "far"


@register("direct", layouts=("zigzag", "cyclic", "contiguous"), channels=(NEAR, FAR, "results"))
def direct(
    at: Pass,
    *,
    near: Annotated[int, Option("neighbouring ranks that are near each other, such as those of a node")] = 8,
) -> Iterator[Step]:
    rank = at.rank
    size = near if near < at.n else max(1, at.n // 2)
    others = [(rank + distance) % at.n for distance in range(1, at.n)]  # not all ranks ask the same one first

    def among(channel: str) -> list[int]:
        return [other for other in others if (other // size == rank // size) == (channel == NEAR)]

    def fetch(channel: str) -> tuple[Comm, ...]:
        sends = [Send(T.KV, rank, other, channel) for other in among(channel) if at.visible_pairs(other, rank)]
        receives = [Recv(T.KV, other, other, channel) for other in among(channel) if at.visible_pairs(rank, other)]
        return (*sends, *receives)

    def give_back(channel: str) -> tuple[Comm, ...]:
        sends = [Send(T.DKV, other, other, "results") for other in among(channel) if at.visible_pairs(rank, other)]
        receives = [Recv(T.DKV, rank, other, "results") for other in among(channel) if at.visible_pairs(other, rank)]
        return (*sends, *receives)

    def blocks(channel: str) -> tuple[Attend, ...]:
        return tuple(Attend((rank,), (other,)) for other in among(channel))

    own = (Attend((rank,), (rank,)),)
    fetches = fetch(NEAR) + fetch(FAR)
    if at.backward:
        yield Step(fetches)
        yield Step(attend=blocks(NEAR))
        yield Step(give_back(NEAR), blocks(FAR))
        yield Step(give_back(FAR), own)
    else:
        yield Step(fetches, own)
        yield Step(attend=blocks(NEAR))
        yield Step(attend=blocks(FAR))
