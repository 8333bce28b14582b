"""The page tables of all ranks: which rank holds which token of which sequence.

Each rank has the tables of all ranks, and all ranks make the same decisions. So nothing is sent to admit a sequence,
to shard its tokens or to free it. A page holds rows of one sequence; forks share full pages.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from megatron.context_parallel.errors import UsageError

PAGE = 64  # rows of a page
Ints = NDArray[numpy.int64]


class CacheFull(UsageError):
    """The requested tokens do not fit.

    Attributes:
        room: the number of new tokens of the sequence that fit.
    """

    def __init__(self, text: str, room: int) -> None:
        super().__init__(text)
        self.room = room


@dataclass
class RankRows:
    """The rows of a sequence on one rank.

    Attributes:
        pages: the pages of the rows; all but the last are full.
        positions: the position of each in the sequence, ascending.
        slots: the index of each among all rows of the rank's pages.
        inherited: the number of rows inherited by a fork.
    """

    pages: list[int] = field(default_factory=list)
    positions: array = field(default_factory=lambda: array("q"))
    slots: array = field(default_factory=lambda: array("q"))
    inherited: int = 0

    @property
    def own(self) -> int:
        """The number of rows that were not inherited."""
        return len(self.positions) - self.inherited


class _Store:
    """The pages of one rank."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))  # a heap, lowest first, so that pages of a sequence are neighbours
        self.users = [0] * pages
        self.filled = [0] * pages
        self.rows = 0

    def take(self) -> int:
        page = heapq.heappop(self.free)
        self.users[page] = 1
        return page

    def fill(self, page: int, rows: int) -> None:
        self.filled[page] += rows
        self.rows += rows

    def release(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            self.fill(page, -self.filled[page])
            heapq.heappush(self.free, page)


class PageTables:
    """The page tables of n ranks.

    Args:
        n: the number of ranks.
        pages: pages per rank.
        page: rows per page, at most 64, so that ranks differ by at most a page.

    Raises:
        UsageError: a page has more than 64 rows, or there are no pages.
    """

    def __init__(self, n: int, pages: int, page: int = PAGE) -> None:
        if not 1 <= page <= PAGE or pages < 1:
            raise UsageError(f"{pages} pages of {page} rows: need 1 page or more of 1 to {PAGE} rows, such as {PAGE}")
        self.n = n
        self.page = page
        self.capacity = n * pages * page
        self._stores = [_Store(pages) for _ in range(n)]
        self._parts: dict[int, list[RankRows]] = {}
        self._next = 0

    # -- what there is -----------------------------------------------------------------------------------------

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._parts

    def length(self, sequence: int) -> int:
        """The number of tokens of a sequence."""
        return sum(len(part.positions) for part in self._parts[sequence])

    def rows(self) -> list[int]:
        """The number of rows that each rank stores; shared rows of forks count once."""
        return [store.rows for store in self._stores]

    def count(self, sequence: int, rank: int, first: int = 0) -> int:
        """The number of rows of a sequence on a rank, with positions from `first` on."""
        positions = self._parts[sequence][rank].positions
        return len(positions) - bisect_left(positions, first)

    def positions(self, sequence: int, rank: int, first: int = 0) -> Ints:
        """The positions of a sequence's rows on a rank, from `first` on, ascending."""
        positions = self._parts[sequence][rank].positions
        return _copied(positions[bisect_left(positions, first) :])

    def slots(self, sequence: int, rank: int, first: int = 0) -> Ints:
        """The indices of these rows among all rows of the rank's pages."""
        part = self._parts[sequence][rank]
        return _copied(part.slots[bisect_left(part.positions, first) :])

    def span(self, sequence: int, rank: int, first: int = 0) -> slice | None:
        """The same as a slice, if the pages are consecutive."""
        part = self._parts[sequence][rank]
        row = bisect_left(part.positions, first)
        if row == len(part.slots) or part.pages != [*range(part.pages[0], part.pages[0] + len(part.pages))]:
            return None
        return slice(part.slots[row], part.slots[-1] + 1)

    def room(self, sequence: int | None = None) -> int:
        """The number of tokens that fit now, of a new sequence or of an existing one."""
        parts = self._parts[sequence] if sequence is not None else [RankRows() for _ in self._stores]
        return sum(self._rooms(parts, [len(store.free) for store in self._stores]))

    def _rooms(self, parts: list[RankRows], free: list[int]) -> list[int]:
        """The number of further rows of a sequence that fit on each rank."""
        return [
            len(part.pages) * self.page - len(part.positions) + pages * self.page
            for part, pages in zip(parts, free, strict=True)
        ]

    # -- what changes ------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Creates an empty sequence and returns its number."""
        self._next += 1
        self._parts[self._next] = [RankRows() for _ in range(self.n)]
        return self._next

    def add(self, new: Mapping[int, int]) -> dict[int, list[int]]:
        """Shards the next tokens of sequences over the ranks.

        All ranks get the same number of rows of a sequence, or one less; the least full ranks get the remaining ones.
        As in the load balanced sharding of section 3.5.1 of Yang et al. (2024), rank i takes the slices i and 2n-1-i.

        Args:
            new: the number of new tokens of each sequence, 1 or more.

        Returns:
            For each sequence, the number of rows of each rank.

        Raises:
            CacheFull: not all of them fit. Nothing has changed then.
        """
        free = [len(store.free) for store in self._stores]
        stored = self.rows()
        dealt: dict[int, list[int]] = {}
        for sequence, tokens in new.items():
            parts = self._parts[sequence]
            rooms = self._rooms(parts, free)
            if sum(rooms) < tokens:
                raise self._refusal(sequence, tokens, sum(rooms))
            dealt[sequence] = _shares([part.own for part in parts], stored, rooms, tokens)
            for rank, (part, rows) in enumerate(zip(parts, dealt[sequence], strict=True)):
                free[rank] -= -(-(len(part.positions) + rows) // self.page) - len(part.pages)
                stored[rank] += rows
        for sequence, shares in dealt.items():
            self._deal(sequence, shares)
        return dealt

    def _refusal(self, sequence: int, tokens: int, room: int) -> CacheFull:
        whole = self.n * self.page
        enough = -(-(self.capacity + tokens - room) // whole) * whole
        return CacheFull(
            f"sequence {sequence}: {tokens} new tokens, but the cache has space for {room}; free sequences, or give "
            f"--cache-tokens {enough}",
            room,
        )

    def _deal(self, sequence: int, shares: list[int]) -> None:
        place = self.length(sequence)
        halves = [(rank, (share + 1) // 2) for rank, share in enumerate(shares)]
        halves += [(rank, share // 2) for rank, share in reversed([*enumerate(shares)])]
        for rank, rows in halves:
            part = self._parts[sequence][rank]
            store = self._stores[rank]
            part.positions.extend(range(place, place + rows))
            place += rows
            while (left := len(part.positions) - len(part.slots)) > 0:
                if len(part.slots) == len(part.pages) * self.page:
                    part.pages.append(store.take())
                self._fill(part, store, min(left, len(part.pages) * self.page - len(part.slots)))

    def _fill(self, part: RankRows, store: _Store, rows: int) -> None:
        """Adds the next rows of a sequence to its last page."""
        slot = part.pages[-1] * self.page + len(part.slots) % self.page
        part.slots.extend(range(slot, slot + rows))
        store.fill(part.pages[-1], rows)

    def fork(self, sequence: int, tokens: int) -> tuple[int, list[tuple[int, int] | None]]:
        """Creates a sequence that begins with the first tokens of another. It shares the full pages.

        Returns:
            Its number, and for each rank the source and the target of the page to copy, if the last page is not full.

        Raises:
            CacheFull: no page is left for such a copy.
            UsageError: `tokens` is more than the sequence has.
        """
        if not 0 <= tokens <= self.length(sequence):
            raise UsageError(
                f"fork of {tokens} tokens of sequence {sequence}: it has {self.length(sequence)}; give at most that"
            )
        parts = self._parts[sequence]
        rows = [bisect_left(part.positions, tokens) for part in parts]
        if any(count % self.page and not store.free for count, store in zip(rows, self._stores, strict=True)):
            raise CacheFull(
                f"fork of {tokens} tokens of sequence {sequence}: no page is left to copy its last page; free "
                "sequences, or fork fewer tokens",
                0,
            )
        new = self.open()
        copies = list[tuple[int, int] | None]()
        for part, store, count, own in zip(parts, self._stores, rows, self._parts[new], strict=True):
            full, rest = divmod(count, self.page)
            own.pages, own.positions, own.inherited = part.pages[:full], part.positions[:count], count
            own.slots = part.slots[: full * self.page]
            for page in own.pages:
                store.users[page] += 1
            if rest:
                own.pages.append(store.take())
                self._fill(own, store, rest)
            copies.append((part.pages[full], own.pages[-1]) if rest else None)
        return new, copies

    def free(self, sequence: int) -> None:
        """Frees a sequence and its pages, except pages shared with forks."""
        for part, store in zip(self._parts.pop(sequence), self._stores, strict=True):
            for page in part.pages:
                store.release(page)


def _copied(numbers: array) -> Ints:
    """A copied slice of an array, because the array may grow."""
    return numpy.frombuffer(numbers, numpy.int64)


def _shares(own: list[int], stored: list[int], rooms: list[int], tokens: int) -> list[int]:
    """The number of the `tokens` rows for each rank: the ranks with the fewest rows of the sequence come first.

    Args:
        own: rows of the sequence on each rank.
        stored: all rows on each rank.
        rooms: rows that fit on each rank, `tokens` or more in total.
    """
    if len(own) == 1:
        return [tokens]

    def up_to(level: int) -> list[int]:
        return [min(max(level - rows, 0), room) for rows, room in zip(own, rooms, strict=True)]

    low, high = min(own), max(own) + tokens + 1  # the highest level with at most `tokens` rows is in low .. high - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(up_to(middle)) <= tokens else (low, middle)
    shares = up_to(low)
    more = [rank for rank, share in enumerate(shares) if own[rank] + share == low and share < rooms[rank]]
    more.sort(key=lambda rank: (stored[rank] + shares[rank], rank))
    for rank in more[: tokens - sum(shares)]:
        shares[rank] += 1
    return shares
