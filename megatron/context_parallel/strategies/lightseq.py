"""DistAttn of LightSeq (Li et al. 2023): contiguous chunks, each fetched from its owner; early ranks help late ones.

In slot t rank r works with a chunk of rank r-t (mod n). If that rank is earlier, r fetches its keys and values and
attends to them with its own queries (section 3.1, algorithm 1). Otherwise r has no such pair left under a causal mask
and helps that late rank (section 3.2): it fetches its queries, attends with its own keys and values, and returns the
partial output, which the late rank merges. So n//2 + 1 slots do the work of n; only if n is even, n/2 ranks idle in
the last of them. A full mask keeps everyone busy without help, in n slots.

What is fetched for a slot flies during the slot before, and what it produces for others during the slot after: a
helper's output forward; backward the gradient of whatever was fetched, straight to its owner. Backward the local pair
comes last and covers the last gradients, which take longer to send than the first fetch that then nothing covers.

Volume received, rank average: forward n-1 units; backward 2(n-1) - h/n, where h = m(m+1)/2 with m = (n-1)//2 is the
number of pairs computed by helpers, to which delta travels instead of the output. A full mask takes twice n-1 and
2(n-1).
"""

from ..errors import UsageError
from ..mask import Pairs
from ..plan.ir import Attend, Comm, Recv, Send, Step, T
from .registry import register


@register("lightseq", layouts=("contiguous",), options=("balance", "prefetch"))
def lightseq(
    r: int, n: int, sees: Pairs, backward: bool, *, balance: bool = True, prefetch: bool = True
) -> tuple[Step, ...]:
    """Steps of rank r of n.

    Args:
        balance: under a causal mask early ranks help late ones; if not, they idle.
        prefetch: communication flies during the slots before and after; if not, a slot waits for its own fetch, and
            for the results that come with it (the ablation).
    """
    for option, value in (("balance", balance), ("prefetch", prefetch)):
        if not isinstance(value, bool):
            raise UsageError(f"--cp-strategy lightseq: {option} {value!r} is no switch; give True or False")

    helps = balance and sees.look_back

    def pair(rank: int, t: int) -> tuple[int, int] | None:
        """The (query chunk, key/value chunk) that `rank` computes in slot t."""
        other = (rank - t) % n
        if helps and other > rank:
            return (other, rank) if 2 * t < n and sees(other, rank) else None
        return (rank, other) if sees(rank, other) else None

    def travels(rank: int, t: int, key_side: T | None, query_side: T) -> T | None:
        """Which of the two moves between `rank`, for its slot t, and the owner of the chunk that is not its own."""
        if t == 0 or not (found := pair(rank, t)):
            return None
        return key_side if found[0] == rank else query_side

    def fetch(t: int) -> list[Comm]:
        wanted, client, ops = (r - t) % n, (r + t) % n, []
        sides = (T.KV, T.QDO if backward else T.Q)
        if tensor := travels(client, t, *sides):
            ops.append(Send(tensor, r, client, channel="fetch"))
        if tensor := travels(r, t, *sides):
            ops.append(Recv(tensor, wanted, wanted, channel="fetch"))
        return ops

    def give_back(t: int) -> list[Comm]:
        fetched, client, ops = (r - t) % n, (r + t) % n, []
        sides = (T.DKV, T.DQ) if backward else (None, T.O)
        channel = "results" if prefetch else "fetch"  # the next fetch waits for all of its channel
        if tensor := travels(r, t, *sides):
            ops.append(Send(tensor, fetched, fetched, channel=channel))
        if tensor := travels(client, t, *sides):
            ops.append(Recv(tensor, r, client, reduce=True, channel=channel))
        return ops

    slots = list(range(n // 2 + 1 if helps else n))
    if backward:
        slots = [*slots[1:], 0]
    fetches, results = [fetch(t) for t in slots], [give_back(t) for t in slots]
    blocks = [(Attend((mine[0],), (mine[1],)),) if (mine := pair(r, t)) else () for t in slots]
    if prefetch:
        rows = zip([*fetches, [], []], [[], [], *results], [(), *blocks, ()], strict=True)
        steps = [Step((*ahead, *back), block) for ahead, back, block in rows]
    else:
        rows = zip([*fetches, []], [[], *results], [*blocks, ()], strict=True)
        steps = [step for comm, back, block in rows for step in (Step((*comm, *back)), Step(attend=block))]
    return tuple(step for step in steps if step.comm or step.attend)
