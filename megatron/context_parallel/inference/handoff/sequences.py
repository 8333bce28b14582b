"""The sequences of one rank that decoders may fetch, and their finished rows."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from megatron.context_parallel.inference.cache import KVCache
from megatron.context_parallel.inference.pages import Ints, PageTables
from megatron.context_parallel.integration.vllm.wire import PIECE


class Closed(Exception):
    """The sequence cannot be read any more; the message says why."""


@dataclass
class _Handed:
    """A sequence that is handed over.

    Attributes:
        tokens: the number of its tokens when all are prefilled.
        finished: tokens whose rows are in the cache.
        pieces: positions and slots of the finished rows, at most `PIECE` a piece.
        closed: why it cannot be read; "" if it can.
    """

    tokens: int
    finished: int = 0
    pieces: list[tuple[Ints, Ints]] = field(default_factory=list)
    closed: str = ""


class HandedSequences:
    """What one rank has to give. The main thread opens and closes sequences, the thread of the port reads them.

    A closed sequence is not read: a page that is freed after `close` was never read with the rows of another sequence.

    Args:
        tables: the page tables of all ranks.
        cache: the cache of this rank.
        rank: this rank in the context group.
    """

    def __init__(self, tables: PageTables, cache: KVCache, rank: int) -> None:
        self._tables, self._cache, self._rank = tables, cache, rank
        self._open: dict[str, _Handed] = {}
        self._lock = threading.Lock()
        self.opened: Callable[[str], object] = lambda name: None  # both are called in the main thread
        self.changed: Callable[[], object] = lambda: None

    # -- for the main thread ---------------------------------------------------------------------------------------

    def open(self, name: str, tokens: int) -> None:
        """A sequence of so many tokens is being prefilled."""
        with self._lock:
            self._open[name] = _Handed(tokens)
        self.opened(name)
        self.changed()

    def finish_rows(self, name: str, sequence: int, end: int) -> None:
        """All rows with positions below `end` are in the cache, and will not change."""
        handed = self._open[name]
        positions = self._tables.positions(sequence, self._rank, handed.finished)
        positions = positions[: numpy.searchsorted(positions, end)]
        slots = self._tables.slots(sequence, self._rank, handed.finished)[: len(positions)]
        pieces = [(positions[i : i + PIECE], slots[i : i + PIECE]) for i in range(0, len(positions), PIECE)]
        with self._lock:
            handed.pieces += pieces
            handed.finished = end
        self.changed()

    def close(self, name: str, why: str) -> None:
        """End the reading of a sequence, before its pages are freed. Unknown ones are ignored."""
        with self._lock:
            handed = self._open.pop(name, None)
            if handed:
                handed.closed = why
        self.changed()

    # -- for the thread of the port --------------------------------------------------------------------------------

    def find(self, name: str) -> "Reading | None":
        """A sequence to read; None if there is none of that name."""
        with self._lock:
            handed = self._open.get(name)
        return Reading(handed, self._cache, self._lock) if handed else None


class Reading:
    """Reads the rows of a sequence, piece by piece."""

    def __init__(self, handed: _Handed, cache: KVCache, lock: threading.Lock) -> None:
        self._handed, self._cache, self._lock = handed, cache, lock
        self.tokens = handed.tokens

    def pieces(self) -> tuple[int, bool]:
        """The number of pieces so far, and whether there will be no more.

        Raises:
            Closed: the sequence was closed.
        """
        with self._lock:
            self._check()
            return len(self._handed.pieces), self._handed.finished == self._handed.tokens

    def positions(self, piece: int, first: int) -> Ints:
        """The positions of a piece from `first` on."""
        positions = self._handed.pieces[piece][0]
        return positions[numpy.searchsorted(positions, first) :]

    def rows(self, piece: int, first: int, layer: int, heads: slice) -> memoryview:
        """The bytes of keys [rows, heads, key_dim], then of values, at these positions.

        Raises:
            Closed: the sequence was closed.
        """
        positions, slots = self._handed.pieces[piece]
        wanted = torch.from_numpy(slots[numpy.searchsorted(positions, first) :])
        with self._lock:
            self._check()
            # On the default stream of a GPU, so after the pass that wrote them.
            keys, values = self._cache.rows(layer, wanted.to(self._cache.layers[layer][0].device))
            parts = [_bytes(keys[:, heads]), _bytes(values[:, heads])]
        return torch.cat(parts).numpy().data

    def _check(self) -> None:
        if self._handed.closed:
            raise Closed(self._handed.closed)


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().cpu().flatten().view(torch.uint8)
