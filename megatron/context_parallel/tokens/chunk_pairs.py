"""Which chunks of queries see which chunks of keys. This is all that a plan needs from a mask."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .shift import Shift


@dataclass(frozen=True)
class Pairs:
    """Which of n query chunks see which of n key/value chunks: `pairs(q, kv)` is True or False.

    Attributes:
        rows: for each query chunk, an integer whose bits are the key/value chunks that it sees.
    """

    rows: tuple[int, ...]

    @classmethod
    def all(cls, n: int) -> "Pairs":
        return cls(((1 << n) - 1,) * n)

    def __call__(self, q_chunk: int, kv_chunk: int) -> bool:
        return bool(self.rows[q_chunk] >> kv_chunk & 1)

    def any(self, q_chunks: Iterable[int], kv_chunks: Iterable[int]) -> bool:
        """Whether any of the query chunks sees any of the key/value chunks."""
        bits = sum([1 << kv for kv in kv_chunks])
        return any([self.rows[q] & bits for q in q_chunks])

    @property
    def n(self) -> int:
        return len(self.rows)

    @property
    def full(self) -> bool:
        """Every chunk sees every chunk."""
        return all(row == (1 << self.n) - 1 for row in self.rows)

    def repeats(self, shift: Shift) -> bool:
        """Whether a chunk that is moved by the period sees what it saw before, moved."""
        by = shift.period
        return all(shift.moved_bits(row, by) == self.rows[shift.moved(q, by)] for q, row in enumerate(self.rows))

    @cached_property
    def causal(self) -> bool:
        """No chunk sees a later one."""
        return all(row >> q <= 1 for q, row in enumerate(self.rows))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """For each key/value chunk the query chunks that see it, as bits."""
        rows = (format(row, f"0{self.n}b") for row in reversed(self.rows))  # binary digits, the last chunk first
        return tuple(int("".join(column), 2) for column in zip(*rows, strict=True))[::-1]

    def seen_from(self, first: int, kv_chunk: int) -> int:
        """The query chunks that see `kv_chunk`, as bits. Bit i is chunk first + i, modulo n."""
        return rotated(self.columns[kv_chunk], first, self.n)

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """For each key/value chunk, how many ranks it visits in a ring, from its owner to the last one that sees it."""
        return tuple(max(1, self.seen_from(chunk, chunk).bit_length()) for chunk in range(self.n))


def rotated(bits: int, first: int, size: int) -> int:
    """`bits`, `size` of them, rotated so that bit `first` becomes bit 0."""
    return bits >> first | (bits & (1 << first) - 1) << (size - first)
