"""DistAttn of LightSeq (Li et al. 2023): contiguous chunks, each fetched from its owner; early ranks help late ones.

In slot t rank r works with a chunk of rank r-t (mod n). If that rank is earlier, r fetches its keys and values and
computes them with its own queries (section 3.1, algorithm 1). Otherwise r has no such pair left under a causal mask and
helps that late rank (section 3.2): it fetches the rank's queries, computes them with its own keys and values, and
returns the partial output, which the late rank merges. So n//2 + 1 slots do the work of n. Only if n is even, n/2 ranks
idle in the last slot. With a full mask all ranks are busy without help, in n slots.

The chunks for a slot are sent during the previous slot. Its results for other ranks are sent during the next slot: in
the forward pass the output of a helper, in the backward pass the gradient of the fetched chunk, directly to its owner.
In the backward pass the local pair comes last. It hides the last gradients, which take longer to send than the first
fetch. The first fetch is then not hidden.

Units received, as an average of the ranks: forward n-1, backward 2(n-1) - h/n. Helpers compute h = m(m+1)/2 pairs, with
m = (n-1)//2, and get delta instead of the output. With a full mask both n-1 and 2(n-1) double.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated

from megatron.context_parallel.options import Option
from megatron.context_parallel.plan.ir import Attend, Comm, Step, T

from .messages import Ring, Rule
from .registry import Pass, register


@register("lightseq", layouts=("contiguous",), channels=("fetch", "results"), period=1)
def lightseq(
    at: Pass,
    *,
    balance: Annotated[bool, Option("let early ranks help late ones under a causal mask; if false, they idle")] = True,
    prefetch: Annotated[
        bool, Option("overlap communication with the slots before and after; if false, each slot waits for its own")
    ] = True,
) -> Iterator[Step]:
    n = at.n
    visible_pairs = at.visible_pairs
    helps = balance and at.visible_pairs.causal

    def pair(rank: int, t: int) -> tuple[int, int] | None:
        """The (query chunk, key/value chunk) that `rank` computes in slot t."""
        other = (rank - t) % n
        if helps and other > rank:
            return (other, rank) if 2 * t < n and visible_pairs(other, rank) else None
        return (rank, other) if visible_pairs(rank, other) else None

    @cache
    def fetched(rank: int, t: int) -> T | None:
        """Which of the two chunks is not `rank`'s own."""
        found = pair(rank, t) if t else None
        return found and (T.KV if found[0] == rank else at.query)

    def fetch(t: int) -> tuple[Comm, ...]:
        """The owner of each chunk for slot t sends it to the rank t places ahead."""

        def wanted(tensor: T) -> Rule:
            return lambda p: p if fetched((p + t) % n, t) is tensor else None

        return owners.shift(T.KV, wanted(T.KV), by=t) + owners.shift(at.query, wanted(at.query), by=t)

    def give_back(t: int) -> tuple[Comm, ...]:
        """The partial result of the fetched chunk returns to its owner."""

        def made_of(tensor: T) -> Rule:
            return lambda p: (p - t) % n if fetched(p, t) is tensor else None

        back = clients.shift(at.result, made_of(at.query), by=-t)
        return back + clients.shift(T.DKV, made_of(T.KV), by=-t) if at.backward else back

    owners = Ring(at.rank, n, channel="fetch")
    clients = Ring(at.rank, n, channel="results" if prefetch else "fetch")
    slots = list(range(n // 2 + 1 if helps else n))
    if at.backward:
        slots = [*slots[1:], 0]
    blocks = [(Attend((mine[0],), (mine[1],)),) if (mine := pair(at.rank, t)) else () for t in slots]
    before = [fetch(t) for t in slots] + [()]
    after = [()] + [give_back(t) for t in slots]
    if prefetch:
        for ahead, back, block in zip([*before, ()], [(), *after], [(), *blocks, ()], strict=True):
            yield Step(ahead + back, block)
    else:
        for ahead, back, block in zip(before, after, [*blocks, ()], strict=True):
            yield Step(ahead + back)
            yield Step(attend=block)
