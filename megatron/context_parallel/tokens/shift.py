"""Numbers of ranks and chunks that are moved together, where ranks do the same from another place."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Shift:
    """Moves the numbers 0 to n - 1, by multiples of `period`.

    Every number grows by as much, modulo n. With a `width` the numbers are a square grid, number r + `width` c in row r
    and column c. Then a move by `width` numbers is one column further, and also one row further.

    Attributes:
        n: how many numbers.
        period: the numbers below it represent all: no two of them are moved to each other. A multiple of `width`.
        width: of the grid, width² = n; 1: there is none.
    """

    n: int
    period: int
    width: int = 1

    def way_back(self, number: int) -> int:
        """The move that takes a number to its representative: 0 or less."""
        return -(number // self.period * self.period)

    def representative(self, number: int) -> int:
        """The number below `period` that a number is moved to."""
        return self.moved(number, self.way_back(number))

    def moved(self, number: int, by: int) -> int:
        """A number, moved by a multiple of `period`."""
        number = (number + by) % self.n
        row = number % self.width
        return number - row + (row + by // self.width) % self.width

    def moved_bits(self, bits: int, by: int) -> int:
        """A set of numbers as bits, with every number moved."""
        by %= self.n
        bits = (bits << by | bits >> (self.n - by)) & (1 << self.n) - 1
        rows = by // self.width % self.width
        if not rows:
            return bits
        stay = self._first_rows[self.width - rows]
        return (bits & stay) << rows | (bits & ~stay) >> (self.width - rows)

    @cached_property
    def _first_rows(self) -> list[int]:
        """The numbers of the first 0, 1, 2, ... rows of the grid, as bits."""
        columns = ((1 << self.n) - 1) // ((1 << self.width) - 1)
        return [((1 << rows) - 1) * columns for rows in range(self.width + 1)]
