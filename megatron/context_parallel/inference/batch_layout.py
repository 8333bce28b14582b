"""One forward pass over new tokens of some sequences: the rows of each rank, and where they are in its cache."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy
import torch
from torch import Tensor

from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.tokens.layout import ListedChunks
from megatron.context_parallel.tokens.mask import Mask, Sequences

from .pages import PageTables


class BatchLayout:
    """The chunks of a forward pass, from page tables that have the new tokens already.

    Args:
        tables: of all ranks.
        new: the new tokens of each sequence.
        rank: this rank; device: where its cache is.

    Attributes:
        sequences: in ascending order, as their rows follow each other.
        tokens, positions: int64 [rows], this rank's new rows; new_slots: where they are in the cache. On the device.
        rows: how many these are.
        last: for each sequence whose last token is on this rank, its row.
        longest: tokens of the longest sequence; several: whether a sequence has more than one new token.
    """

    def __init__(self, tables: PageTables, new: Mapping[int, Sequence[int]], rank: int, device: torch.device) -> None:
        self.tables, self.rank, self.device = tables, rank, device
        self.sequences = sorted(new)
        lengths = [tables.length(s) for s in self.sequences]
        pairs = zip(self.sequences, lengths, strict=True)
        self.starts = {s: length - len(new[s]) for s, length in pairs}  # the place of the first new token
        self.longest = max(lengths)
        self.several = sum(map(len, new.values())) > len(new)
        self.batch = Sequences(lengths)
        self.lengths = lengths
        self.queries = self._chunks(self.starts)
        tokens = list[int]()
        positions = list[int]()
        slots = list[int]()
        self.last = dict[int, int]()
        for (s, start), length in zip(self.starts.items(), lengths, strict=True):
            if places := tables.positions(s, rank, start).tolist():
                given = new[s]
                tokens += [given[place - start] for place in places]
                positions += places
                slots += tables.slots(s, rank, start).tolist()
                if places[-1] == length - 1:
                    self.last[s] = len(tokens) - 1
        self.rows = len(tokens)
        rows = torch.tensor([tokens, positions, slots], dtype=torch.int64, device=device)
        self.tokens, self.positions, self.new_slots = rows.unbind()
        self._views: dict[tuple, tuple[Blocks, Tensor | slice]] = {}

    def _chunks(self, first: Mapping[int, int]) -> ListedChunks:
        """The rows of each rank, of places from `first` on in each sequence."""
        tables = self.tables
        of = first.items()
        begins = [0, *accumulate(self.lengths[:-1])]  # of each sequence among the rows of all

        def positions(rank: int) -> Tensor:
            parts = [tables.positions(s, rank, start) + begin for (s, start), begin in zip(of, begins, strict=True)]
            return torch.from_numpy(numpy.concatenate(parts))

        def counts(rank: int) -> tuple[int, ...]:
            return tuple([tables.count(s, rank, start) for s, start in of])

        return ListedChunks(tuple(map(counts, range(tables.n))), positions)

    def view(self, window: tuple[int, int], kernel: Kernel) -> tuple[Blocks, Tensor | slice]:
        """The blocks under a window, the same for all layers that have it, and where this rank's keys are.

        Keys that no new token sees are left out.
        """
        key = window, kernel
        if key not in self._views:
            first = {s: max(0, start - window[0]) if window[0] >= 0 else 0 for s, start in self.starts.items()}
            # A single new token sees all keys that are left.
            mask = Mask(True, window, self.batch) if self.several else Mask(False, documents=self.batch)
            self._views[key] = Blocks(mask, self.queries, self._chunks(first), kernel), self._slots(first)
        return self._views[key]

    def _slots(self, first: Mapping[int, int]) -> Tensor | slice:
        """Where this rank's keys are. Those of one sequence in pages that follow each other need no copy."""
        if len(first) == 1 and (span := self.tables.span(self.sequences[0], self.rank, first[self.sequences[0]])):
            return span
        slots = [self.tables.slots(s, self.rank, start) for s, start in first.items()]
        return torch.from_numpy(numpy.concatenate(slots)).to(self.device)
