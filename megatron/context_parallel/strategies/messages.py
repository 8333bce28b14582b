"""Messages between ranks. One rule determines what a rank sends, and so what its peer receives."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.context_parallel.plan.ir import Comm, Recv, Send, T

Rule = Callable[[int], int | None]  # the chunk that a sender sends, if any


def relay(tensor: T, rank: int, to: int, source: int, chunk: Rule, channel: str) -> tuple[Comm, ...]:
    """The operations of `rank`, if each rank x sends chunk(x), unless it is None, to one other rank.

    Args:
        tensor: the tensor to send.
        rank: the rank whose operations these are.
        to: the rank that it sends to. If it is `rank`, there is nothing to do.
        source: the rank that it receives from.
        chunk: the rule.
        channel: the channel of the messages.
    """
    return () if to == rank else _both(tensor, chunk(rank), to, chunk(source), source, channel)


def _both(tensor: T, sent: int | None, to: int, taken: int | None, source: int, channel: str) -> tuple[Comm, ...]:
    sends = () if sent is None else (Send(tensor, sent, to, channel),)
    return sends if taken is None else (*sends, Recv(tensor, taken, source, channel))


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of the ranks start, start + stride, ..., seen from one of them.

    Attributes:
        place: the ring position of this rank, from 0.
        size: the number of ranks in the ring.
        start: the rank at ring position 0.
        stride: the distance between neighbours.
        channel: the channel of the messages.
    """

    place: int
    size: int
    start: int = 0
    stride: int = 1
    channel: str = "ring"

    def rank(self, place: int) -> int:
        """The rank at a ring position, modulo the size."""
        return self.start + place % self.size * self.stride

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the ring, in order."""
        return tuple(self.rank(place) for place in range(self.size))

    def shift(self, tensor: T, chunk: Rule, by: int = 1) -> tuple[Comm, ...]:
        """This rank's operations, if each ring position p sends chunk(p), unless it is None, to p + by."""
        if by % self.size == 0:
            return ()
        to, source = self.rank(self.place + by), self.rank(self.place - by)
        sent, taken = chunk(self.place), chunk((self.place - by) % self.size)
        return _both(tensor, sent, to, taken, source, self.channel)
