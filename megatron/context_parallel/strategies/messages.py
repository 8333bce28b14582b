"""Messages between ranks, both ends written once: the rule of what a rank sends tells its peer what it receives."""

from collections.abc import Callable
from dataclasses import dataclass

from ..plan.ir import Comm, Recv, Send, T

Rule = Callable[[int], int | None]  # the chunk that a sender sends, if any


def relay(tensor: T, rank: int, to: int, source: int, chunk: Rule, channel: str) -> tuple[Comm, ...]:
    """What `rank` does where every rank x sends chunk(x) to one rank; `source` is the one whose peer is `rank`."""
    if to == rank:
        return ()
    sent, taken = chunk(rank), chunk(source)
    sends = () if sent is None else (Send(tensor, sent, to, channel),)
    return sends if taken is None else (*sends, Recv(tensor, taken, source, channel))


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks start, start + stride, ... in a circle, seen from one of them.

    Attributes:
        place: of the rank that looks, from 0.
        size: how many ranks.
        channel: of the messages between them.
    """

    place: int
    size: int
    start: int = 0
    stride: int = 1
    channel: str = "ring"

    def rank(self, place: int) -> int:
        """The rank at a place; places go round."""
        return self.start + place % self.size * self.stride

    def shift(self, tensor: T, chunk: Rule, by: int = 1) -> tuple[Comm, ...]:
        """Each place p sends chunk(p), if any, to place p + by; so this place receives chunk(place - by)."""
        to, source = self.rank(self.place + by), self.rank(self.place - by)
        by_rank = lambda rank: chunk((rank - self.start) // self.stride)  # noqa: E731
        return relay(tensor, self.rank(self.place), to, source, by_rank, self.channel)
