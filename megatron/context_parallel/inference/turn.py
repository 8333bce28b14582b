"""One forward pass over new tokens of some sequences: the rows of each rank, and where they are in its cache."""

from collections.abc import Mapping, Sequence

import numpy
import torch
from torch import Tensor

from ..blocks import Blocks
from ..kernels import Kernel
from ..layout import ListedChunks
from ..mask import Mask, Sequences
from .pages import Ints, PageTables


class Turn:
    """The chunks of a forward pass, from page tables that have the new tokens already.

    Args:
        tables: of all ranks.
        new: the new tokens of each sequence.
        rank: this rank; device: where its cache is.

    Attributes:
        sequences: in ascending order, as their rows follow each other.
        tokens, positions: int64 [rows], this rank's new rows; new_slots: where they are in the cache. On the device.
        last: for each sequence whose last token is on this rank, its row.
        longest: tokens of the longest sequence; several: whether a sequence has more than one new token.
    """

    def __init__(self, tables: PageTables, new: Mapping[int, Sequence[int]], rank: int, device: torch.device) -> None:
        self.tables, self.rank, self.device = tables, rank, device
        self.sequences = sorted(new)
        lengths = {s: tables.length(s) for s in self.sequences}
        self.starts = {s: length - len(new[s]) for s, length in lengths.items()}  # the place of the first new token
        self.longest, self.several = max(lengths.values()), any(len(new[s]) > 1 for s in new)
        self.batch = Sequences([lengths[s] for s in self.sequences])
        self.begins = dict(zip(self.sequences, self.batch.bounds.tolist(), strict=False))
        counts = (sum(tables.count(s, r, start) for s, start in self.starts.items()) for r in range(tables.n))
        self.queries = ListedChunks(tuple(counts), self._query_positions)
        tokens, positions, self.last = list[int](), list[Ints](), dict[int, int]()
        for s in self.sequences:
            places = self._new_places(s, rank)
            tokens += [new[s][place - self.starts[s]] for place in places.tolist()]
            positions.append(places)
            if len(places) and places[-1] == lengths[s] - 1:
                self.last[s] = len(tokens) - 1
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
        self.positions = _joined(positions).to(device)
        self.new_slots = _joined([tables.slots(s, rank, start) for s, start in self.starts.items()]).to(device)
        self._views: dict[tuple, tuple[Blocks, Tensor | slice]] = {}

    def _new_places(self, sequence: int, rank: int) -> Ints:
        return self.tables.positions(sequence, rank, self.starts[sequence])

    def _query_positions(self, rank: int) -> Tensor:
        return _joined([self._new_places(s, rank) + self.begins[s] for s in self.sequences])

    def view(self, window: tuple[int, int], kernel: Kernel) -> tuple[Blocks, Tensor | slice]:
        """The blocks under a window, the same for all layers that have it, and where this rank's keys are.

        Keys that no new token sees are left out.
        """
        key = window, kernel
        if key not in self._views:
            first = {s: max(0, start - window[0]) if window[0] >= 0 else 0 for s, start in self.starts.items()}

            def key_positions(rank: int) -> Tensor:
                return _joined([self.tables.positions(s, rank, first[s]) + self.begins[s] for s in self.sequences])

            ranks = range(self.tables.n)
            counts = tuple(sum(self.tables.count(s, r, first[s]) for s in self.sequences) for r in ranks)
            # A single new token sees all keys that are left.
            mask = Mask(True, window, self.batch) if self.several else Mask(False, documents=self.batch)
            blocks = Blocks(mask, self.queries, ListedChunks(counts, key_positions), kernel)
            slots = numpy.concatenate([self.tables.slots(s, self.rank, first[s]) for s in self.sequences])
            self._views[key] = blocks, _as_slice(slots, self.device)
        return self._views[key]


def _joined(parts: list[Ints]) -> Tensor:
    return torch.from_numpy(numpy.concatenate(parts))


def _as_slice(slots: Ints, device: torch.device) -> Tensor | slice:
    """Slots that follow each other as a slice: their rows need no copy."""
    if len(slots) and (numpy.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)
