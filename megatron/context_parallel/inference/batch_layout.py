"""One forward pass over new tokens of some sequences: the rows of each rank, and their slots in its cache."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy
import torch
from torch import Tensor

from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.tokens.documents import Sequences
from megatron.context_parallel.tokens.layout import ListedChunks
from megatron.context_parallel.tokens.mask import Mask

from .pages import PageTables


class BatchLayout:
    """The chunks of a forward pass, from page tables that already contain the new tokens.

    Args:
        tables: the page tables of all ranks.
        new: the new tokens of each sequence.
        rank: this rank; device: the device of its cache.
        scored: sequences of which all rows' logits are wanted.

    Attributes:
        sequences: in ascending order, which is the order of their rows.
        tokens, positions: int64 [rows], of this rank's new rows; of the dummy row if there are none. On the device.
        new_slots: int64 [rows], their slots in the cache.
        wanted: int64, the rows in `last`, then those in `scored`; the dummy row if there are none.
        rows: the number of these rows; 0 if the only one is a dummy, which is neither query nor key.
        last: for each sequence whose last token is on this rank, its row.
        scored: for each scored sequence with new rows on this rank, their positions; their rows are consecutive.
        longest: tokens of the longest sequence; several: whether a sequence has more than one new token.
    """

    def __init__(
        self,
        tables: PageTables,
        new: Mapping[int, Sequence[int]],
        rank: int,
        device: torch.device,
        scored: Collection[int] = (),
    ) -> None:
        self.tables, self.rank, self.device = tables, rank, device
        self.sequences = sorted(new)
        lengths = [tables.length(s) for s in self.sequences]
        pairs = zip(self.sequences, lengths, strict=True)
        self.starts = {s: length - len(new[s]) for s, length in pairs}  # the position of the first new token
        self.longest = max(lengths)
        self.several = sum(map(len, new.values())) > len(new)
        self.batch = Sequences(lengths)
        self.lengths = lengths
        self.queries = self._chunks(self.starts)
        tokens = list[int]()
        positions = list[int]()
        slots = list[int]()
        self.last = dict[int, int]()
        self.scored = dict[int, list[int]]()
        rows_scored = list[int]()
        for (s, start), length in zip(self.starts.items(), lengths, strict=True):
            if own := tables.positions(s, rank, start).tolist():
                given = new[s]
                if s in scored:
                    self.scored[s] = own
                    rows_scored += range(len(tokens), len(tokens) + len(own))
                tokens += [given[position - start] for position in own]
                positions += own
                slots += tables.slots(s, rank, start).tolist()
                if own[-1] == length - 1:
                    self.last[s] = len(tokens) - 1
        self.rows = len(tokens)
        rows = to_device(torch.tensor([tokens or [0], positions or [0]]), device)
        self.tokens, self.positions = rows.unbind()
        self.new_slots = to_device(torch.tensor(slots, dtype=torch.int64), device)
        self.wanted = to_device(torch.tensor([*self.last.values(), *rows_scored] or [0]), device)
        self._views: dict[tuple, tuple[Blocks, Tensor | slice]] = {}

    def _chunks(self, first: Mapping[int, int]) -> ListedChunks:
        """The rows of each rank with positions from `first` on in each sequence."""
        tables = self.tables
        firsts = first.items()
        begins = [0, *accumulate(self.lengths[:-1])]  # the start of each sequence in the concatenated sequences

        def positions(rank: int) -> Tensor:
            parts = [tables.positions(s, rank, start) + begin for (s, start), begin in zip(firsts, begins, strict=True)]
            return torch.from_numpy(numpy.concatenate(parts))

        def counts(rank: int) -> tuple[int, ...]:
            return tuple([tables.count(s, rank, start) for s, start in firsts])

        return ListedChunks(tuple(map(counts, range(tables.n))), positions)

    def view(self, window: tuple[int, int], kernel: Kernel) -> tuple[Blocks, Tensor | slice]:
        """The blocks under a window, the same for all layers with this window, and the slots of this rank's keys.

        Keys that no new token sees are excluded.
        """
        key = window, kernel
        if key not in self._views:
            first = {s: max(0, start - window[0]) if window[0] >= 0 else 0 for s, start in self.starts.items()}
            # A single new token sees all remaining keys.
            mask = Mask(True, window, self.batch) if self.several else Mask(False, documents=self.batch)
            self._views[key] = Blocks(mask, self.queries, self._chunks(first), kernel), self._slots(first)
        return self._views[key]

    def _slots(self, first: Mapping[int, int]) -> Tensor | slice:
        """The slots of this rank's keys. The keys of one sequence in consecutive pages need no copy."""
        if len(first) == 1:
            rows, pages = self.tables.keys(self.sequences[0], self.rank, first[self.sequences[0]])
            if len(rows) == 1 and not pages:
                return rows[0]
        slots = [self.tables.slots(s, self.rank, start) for s, start in first.items()]
        return to_device(torch.from_numpy(numpy.concatenate(slots)), self.device)
