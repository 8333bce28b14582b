"""The rows of a decode step: one new token of each sequence, on the rank that stores it."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from .pages import Ints, KeyRows, PageTables

STEPS = (1, 2, 3, 4, 6)  # numbers of rows; beyond them 8, 12, 16, 24, 32, 48, ...


def bucket(rows: int) -> int:
    """The number of rows, with padding, of a step in which a rank has at most `rows`: few numbers, a third apart."""
    for size in STEPS:
        if rows <= size:
            return size
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


class DecodeRows:
    """The rows of all ranks, from page tables that already contain the new tokens.

    Args:
        tables: the page tables of all ranks.
        new: the new token of each sequence.
        dealt: the new rows of each sequence on each rank, as `PageTables.add` returned them.
        rank: this rank.

    Attributes:
        sequences: all of them, ascending.
        of_ranks: the sequences of each rank's rows, ascending.
        last: the row of each sequence of this rank.
        size: the rows of each rank with padding, a bucket.
        inputs: int64 [3, size] on the host: this rank's tokens, positions and slots. Padding has token and position 0,
            and the slot after the last page.
        longest: tokens of the longest sequence.
    """

    def __init__(
        self, tables: PageTables, new: Mapping[int, Sequence[int]], dealt: Mapping[int, Sequence[int]], rank: int
    ) -> None:
        self.tables, self.rank = tables, rank
        self.sequences = sorted(new)
        self.of_ranks: list[list[int]] = [[] for _ in range(tables.n)]
        for sequence in self.sequences:
            self.of_ranks[dealt[sequence].index(1)].append(sequence)
        mine = self.of_ranks[rank]
        self.last = {sequence: row for row, sequence in enumerate(mine)}
        self.size = bucket(max(map(len, self.of_ranks)))
        self.lengths = {sequence: tables.length(sequence) for sequence in self.sequences}
        self.longest = max(self.lengths.values())
        padding = self.size - len(mine)
        tokens = [new[sequence][0] for sequence in mine] + [0] * padding
        positions = [self.lengths[sequence] - 1 for sequence in mine] + [0] * padding
        slots = [tables.last_slot(sequence, rank) for sequence in mine] + [tables.slots_per_rank] * padding
        self.inputs = torch.tensor([tokens, positions, slots])
        self._keys: dict[int, list[tuple[int, int, KeyRows]]] = {}

    def pages(self) -> dict[int, Ints]:
        """The pages on this rank of each row that has a sequence. Rows of rank i begin at i * size."""
        return {row: self.tables.pages(sequence, self.rank) for row, sequence in self._numbered()}

    def bounds(self, window: int) -> dict[int, tuple[int, int]]:
        """The rows on this rank that each of these rows sees: `first` to `end` - 1 of its sequence's."""
        found = {}
        for row, sequence in self._numbered():
            all_rows = self.tables.count(sequence, self.rank)
            some = self.tables.count(sequence, self.rank, self._first(sequence, window))
            found[row] = all_rows - some, all_rows
        return found

    def _numbered(self) -> Iterator[tuple[int, int]]:
        """The number of each row that has a sequence, among those of all ranks with padding, and the sequence."""
        for rank, sequences in enumerate(self.of_ranks):
            yield from enumerate(sequences, rank * self.size)

    def _first(self, sequence: int, window: int) -> int:
        """The first position that the new token of a sequence sees."""
        return max(0, self.lengths[sequence] - 1 - window) if window >= 0 else 0

    def keys(self, window: int) -> list[tuple[int, int, KeyRows]]:
        """For each row of each rank: the rank, the row, and the keys on this rank that it sees.

        Args:
            window: the tokens before itself that a row sees; -1: all.
        """
        if window not in self._keys:
            found = []
            for rank, sequences in enumerate(self.of_ranks):
                for row, sequence in enumerate(sequences):
                    first = self._first(sequence, window)
                    found.append((rank, row, self.tables.keys(sequence, self.rank, first)))
            self._keys[window] = found
        return self._keys[window]
