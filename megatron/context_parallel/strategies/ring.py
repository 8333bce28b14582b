"""Ring attention: queries stay, keys and values circle (Liu et al. 2023; the baseline of all five papers).

Chunk c starts on rank c and visits ranks c, c+1, ..., so at step s rank r holds chunk r-s. It stops at the last rank
whose queries see it: with a causal mask in the contiguous layout rank n-1, with a window of a chunk's tokens rank c+1.

Backward, the gradient of chunk c is summed along the same way, one step behind, and goes home from the last stop.
Volume received per rank: forward 2(n-1) units, backward 4(n-1).
"""

from collections.abc import Callable

from ..mask import Pairs
from ..plan.ir import Attend, Comm, Recv, Send, Step, T
from .registry import register

Stops = Callable[[int], int]  # chunk -> how many ranks it visits, its owner included


@register("ring", layouts=("zigzag", "cyclic", "contiguous"))
def ring(r: int, n: int, sees: Pairs, backward: bool) -> tuple[Step, ...]:
    """Steps of rank r of n."""
    steps, stops = [], sees.stops.__getitem__
    for s in range(n):
        comm = keys(r, s, n, stops)
        if backward:
            comm += gradients(r, s, n, stops)
        mine = (r - s) % n
        attend = (Attend((r,), (mine,)),) if sees(r, mine) else ()
        steps.append(Step(tuple(comm), attend))
    if backward:
        steps.append(Step(tuple(gradients(r, n, n, stops))))
    return tuple(step for step in steps if step.comm or step.attend)


def keys(r: int, s: int, n: int, stops: Stops) -> list[Comm]:
    """What rank r does with keys and values in step s: pass on what it computes with, take what is next."""
    comm: list[Comm] = []
    mine, incoming = (r - s) % n, (r - s - 1) % n
    if s + 1 < stops(mine):
        comm.append(Send(T.KV, mine, (r + 1) % n))
    if s + 1 < stops(incoming):
        comm.append(Recv(T.KV, incoming, (r - 1) % n))
    return comm


def gradients(r: int, s: int, n: int, stops: Stops) -> list[Comm]:
    """What rank r does with key/value gradients in step s: pass on what step s-1 finished, take what is next."""
    comm: list[Comm] = []
    if s < 2:
        return comm  # the owner's own contribution stays at home
    finished, incoming = (r - s + 1) % n, (r - s) % n
    if s < stops(finished):
        comm.append(Send(T.DKV, finished, (r + 1) % n))
    elif s == stops(finished):
        comm.append(Send(T.DKV, finished, finished))
    if s < stops(incoming):
        comm.append(Recv(T.DKV, incoming, (r - 1) % n, reduce=True))
    if s == stops(r):
        comm.append(Recv(T.DKV, r, (r + s - 1) % n, reduce=True))
    return comm
