"""The page tables of all ranks: which rank holds which token of which sequence.

Each rank has the tables of all ranks, and all ranks make the same decisions. So nothing is sent to admit a sequence,
to shard its tokens or to free it. A page (a block in vLLM's words) holds rows of one sequence; forks share full pages.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from megatron.context_parallel.errors import UsageError

PAGE = 64  # rows of a page
SHORT = 4  # free pages in a row that are not worth a jump
Ints = NDArray[numpy.int64]


class CacheFull(UsageError):
    """The requested tokens do not fit.

    Attributes:
        room: the number of new tokens of the sequence that fit.
    """

    def __init__(self, text: str, room: int) -> None:
        super().__init__(text)
        self.room = room


class KeyRows(NamedTuple):
    """Rows of a rank's cache, in pieces that need no copy.

    Attributes:
        rows: ranges of slots. A slot is the index of a row among all rows of the rank's pages.
        pages: whole pages at equal distances.
    """

    rows: list[slice]
    pages: list[slice]

    def add(self, start: int, step: int, begin: int, end: int, page: int) -> None:
        """Adds the rows from `begin` to `end` - 1 of the pages `start`, `start + step`, ... of `page` rows."""
        if step == 1:
            self.rows.append(slice(start * page + begin, start * page + end))
            return
        whole, stop = -(-begin // page), end // page  # the first whole page, and the page behind the last whole one
        if whole < stop:
            self.pages.append(slice(start + whole * step, start + stop * step, step))
        edges = [(begin, end)] if whole > stop else [(begin, whole * page), (stop * page, end)]
        for first, last in edges:
            if first < last:
                slot = (start + first // page * step) * page + first % page
                self.rows.append(slice(slot, slot + last - first))


@dataclass
class RankRows:
    """The rows of a sequence on one rank.

    Attributes:
        pages: the pages of the rows; all but the last are full.
        positions: the position of each in the sequence, ascending.
        strides: the same pages as start, step and count of pages at equal distances.
        full: the rows of all strides but the last.
        inherited: the number of rows inherited by a fork.
        freed: the number of pages, the first ones, that were freed because no later token sees their rows.
    """

    pages: array = field(default_factory=lambda: array("q"))
    positions: array = field(default_factory=lambda: array("q"))
    strides: list[tuple[int, int, int]] = field(default_factory=list)
    full: KeyRows = field(default_factory=lambda: KeyRows([], []))
    inherited: int = 0
    freed: int = 0

    @property
    def own(self) -> int:
        """The number of rows that were not inherited."""
        return len(self.positions) - self.inherited

    def append(self, page: int, rows: int) -> None:
        """Appends a page of so many rows."""
        self.pages.append(page)
        start, step, count = self.strides.pop() if self.strides else (page, 1, 0)
        if count == 1 and page > start:
            step = page - start
        if page == start + count * step:
            self.strides.append((start, step, count + 1))
        else:
            self.strides += [(start, step, count), (page, 1, 1)]
            self.full.add(start, step, 0, count * rows, rows)

    def keys(self, first: int, page: int) -> KeyRows:
        """The rows with positions from `first` on, in pieces in any order."""
        skipped = bisect_left(self.positions, first) if first else 0
        if not skipped and self.strides:
            found = KeyRows([*self.full.rows], [*self.full.pages])
            start, step, count = self.strides[-1]
            before = (len(self.pages) - count) * page
            found.add(start, step, 0, len(self.positions) - before, page)
            return found
        found = KeyRows([], [])
        before = 0  # rows of the pages before
        for start, step, count in self.strides:
            begin = max(skipped - before, 0)
            end = min(len(self.positions) - before, count * page)
            before += count * page
            if begin < end:
                found.add(start, step, begin, end, page)
        return found


class _PagePool:
    """The pages of one rank: which are free, how many sequences refer to each, and its filled rows."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))  # ascending
        self.references = [0] * pages
        self.filled = [0] * pages
        self.rows = 0
        self._takes = 0
        self._taken = numpy.zeros(pages, numpy.int64)  # when each page was taken last

    def take(self, before: int | None) -> int:
        """A free page for a sequence whose last page is `before`.

        It is the page after it, or one with many free pages after it. So pages of a sequence are neighbours, also while
        several sequences grow. If there are few free pages in a row, a new sequence takes the first of most of them,
        and another one the next free page.
        """
        index = 0 if before is None else bisect_left(self.free, before)
        if before is None or self.free[index : index + 1] != [before + 1]:
            begin, length = self._longest_free_range()
            if length >= SHORT and self.free[begin]:
                index = begin + length // 2
            else:
                index = begin if before is None else index % len(self.free)
        page = self.free.pop(index)
        self.references[page] = 1
        self._takes += 1
        self._taken[page] = self._takes
        return page

    def _longest_free_range(self) -> tuple[int, int]:
        """The index in `free` of the first page of the longest range of free pages, and the length of the range.

        Of several it is the one behind the page that was taken longest ago: a sequence that still grows needs its own.
        Of single pages it is the first, so that the pages of a sequence lie at equal distances.
        """
        free = numpy.array(self.free)
        begins = numpy.concatenate([[0], numpy.flatnonzero(numpy.diff(free) != 1) + 1, [len(free)]])
        lengths = numpy.diff(begins)
        longest = numpy.flatnonzero(lengths == lengths.max())
        oldest = self._taken[free[begins[longest]] - 1].argmin() if lengths[longest[0]] > 1 else 0
        chosen = longest[oldest]
        return int(begins[chosen]), int(lengths[chosen])

    def fill(self, page: int, rows: int) -> None:
        self.filled[page] += rows
        self.rows += rows

    def release(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            self.fill(page, -self.filled[page])
            insort(self.free, page)


class PageTables:
    """The page tables of n ranks.

    Args:
        n: the number of ranks.
        pages: pages per rank.
        page: rows per page, at most 64, so that ranks differ by at most a page.
        window: the most tokens before itself that a token sees in any layer; None: all.

    Raises:
        UsageError: a page has more than 64 rows, or there are no pages.
    """

    def __init__(self, n: int, pages: int, page: int = PAGE, window: int | None = None) -> None:
        if not 1 <= page <= PAGE or pages < 1:
            raise UsageError(f"{pages} pages of {page} rows: need 1 page or more of 1 to {PAGE} rows, such as {PAGE}")
        self.n = n
        self.page = page
        self.window = window
        self.slots_per_rank = pages * page
        self.capacity = n * pages * page
        self._pools = [_PagePool(pages) for _ in range(n)]
        self._rank_rows: dict[int, list[RankRows]] = {}
        self._next = 0

    # -- what there is -----------------------------------------------------------------------------------------

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._rank_rows

    def length(self, sequence: int) -> int:
        """The number of tokens of a sequence."""
        return sum(len(part.positions) for part in self._rank_rows[sequence])

    def rows(self) -> list[int]:
        """The number of rows that each rank stores; shared rows of forks count once."""
        return [pool.rows for pool in self._pools]

    def count(self, sequence: int, rank: int, first: int = 0) -> int:
        """The number of rows of a sequence on a rank, with positions from `first` on."""
        positions = self._rank_rows[sequence][rank].positions
        return len(positions) - bisect_left(positions, first)

    def positions(self, sequence: int, rank: int, first: int = 0) -> Ints:
        """The positions of a sequence's rows on a rank, from `first` on, ascending."""
        positions = self._rank_rows[sequence][rank].positions
        return _array(positions[bisect_left(positions, first) :])

    def slots(self, sequence: int, rank: int, first: int = 0) -> Ints:
        """The slots of these rows: their indices among all rows of the rank's pages."""
        part = self._rank_rows[sequence][rank]
        slots = self.pages(sequence, rank)[:, None] * self.page + numpy.arange(self.page)
        return slots.reshape(-1)[bisect_left(part.positions, first) : len(part.positions)]

    def pages(self, sequence: int, rank: int) -> Ints:
        """The pages of a sequence's rows on a rank, in order."""
        return numpy.array(self._rank_rows[sequence][rank].pages, numpy.int64)

    def last_slot(self, sequence: int, rank: int) -> int:
        """The slot of the last row."""
        part = self._rank_rows[sequence][rank]
        return part.pages[-1] * self.page + (len(part.positions) - 1) % self.page

    def keys(self, sequence: int, rank: int, first: int = 0) -> KeyRows:
        """The same rows in pieces, in any order."""
        return self._rank_rows[sequence][rank].keys(first, self.page)

    def room(self) -> int:
        """The number of tokens of a new sequence that fit now."""
        return self.page * sum(len(pool.free) for pool in self._pools)

    def holds(self, sequence: int, tokens: int) -> bool:
        """Whether the cache has all rows that a token after the first `tokens` of a sequence sees."""
        if self.window is None:
            return True
        first = max(0, tokens - self.window)
        return all(bisect_left(part.positions, first) >= part.freed * self.page for part in self._rank_rows[sequence])

    def can_copy(self) -> bool:
        """Whether each rank has a free page, as a fork needs that copies the last ones."""
        return all(pool.free for pool in self._pools)

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
        self._rank_rows[self._next] = [RankRows() for _ in range(self.n)]
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
        free = [len(pool.free) for pool in self._pools]
        stored = self.rows()
        dealt: dict[int, list[int]] = {}
        for sequence, tokens in new.items():
            parts = self._rank_rows[sequence]
            rooms = self._rooms(parts, free)
            if sum(rooms) < tokens:
                raise self._cache_full(sequence, tokens, sum(rooms))
            dealt[sequence] = _balanced_shares([part.own for part in parts], stored, rooms, tokens)
            for rank, (part, rows) in enumerate(zip(parts, dealt[sequence], strict=True)):
                free[rank] -= -(-(len(part.positions) + rows) // self.page) - len(part.pages)
                stored[rank] += rows
        for sequence, shares in dealt.items():
            self._place_rows(sequence, shares)
        return dealt

    def _cache_full(self, sequence: int, tokens: int, room: int) -> CacheFull:
        whole = self.n * self.page
        enough = -(-(self.capacity + tokens - room) // whole) * whole
        return CacheFull(
            f"sequence {sequence}: {tokens} new tokens, but the cache has space for {room}; free sequences, or give "
            f"--cache-tokens {enough}",
            room,
        )

    def _place_rows(self, sequence: int, shares: list[int]) -> None:
        position = self.length(sequence)
        halves = [(rank, (share + 1) // 2) for rank, share in enumerate(shares)]
        halves += [(rank, share // 2) for rank, share in reversed([*enumerate(shares)])]
        for rank, rows in halves:
            part = self._rank_rows[sequence][rank]
            pool = self._pools[rank]
            done = len(part.positions)
            total = done + rows
            part.positions.extend(range(position, position + rows))
            position += rows
            while done < total:
                if done == len(part.pages) * self.page:
                    part.append(pool.take(part.pages[-1] if part.pages else None), self.page)
                rows_of_page = min(total, len(part.pages) * self.page) - done
                pool.fill(part.pages[-1], rows_of_page)
                done += rows_of_page

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
        if not self.holds(sequence, tokens):
            raise UsageError(
                f"fork of {tokens} tokens of sequence {sequence}: keys that the next token sees were freed; give "
                f"{self.length(sequence)}"
            )
        parts = self._rank_rows[sequence]
        rows = [bisect_left(part.positions, tokens) for part in parts]
        if any(count % self.page and not pool.free for count, pool in zip(rows, self._pools, strict=True)):
            raise CacheFull(
                f"fork of {tokens} tokens of sequence {sequence}: no page is left to copy its last page; free "
                "sequences, or fork fewer tokens",
                0,
            )
        new = self.open()
        copies = list[tuple[int, int] | None]()
        for part, pool, count, own in zip(parts, self._pools, rows, self._rank_rows[new], strict=True):
            full, rest = divmod(count, self.page)
            own.positions, own.inherited = part.positions[:count], count
            own.freed = min(part.freed, full)
            for index, page in enumerate(part.pages[:full]):
                own.append(page, self.page)
                pool.references[page] += index >= own.freed
            if rest:
                own.append(pool.take(own.pages[-1] if own.pages else None), self.page)
                pool.fill(own.pages[-1], rest)
            copies.append((part.pages[full], own.pages[-1]) if rest else None)
        return new, copies

    def free(self, sequence: int) -> None:
        """Frees a sequence and its pages, except pages shared with forks."""
        for part, pool in zip(self._rank_rows.pop(sequence), self._pools, strict=True):
            for page in part.pages[part.freed :]:
                pool.release(page)

    def trim(self, sequence: int) -> None:
        """Frees the pages of a sequence of which its later tokens see no row, because of the window.

        Its length, and the positions and slots of the rows that are seen, stay as they are.
        """
        if self.window is None:
            return
        first = self.length(sequence) - self.window
        for part, pool in zip(self._rank_rows[sequence], self._pools, strict=True):
            unseen = bisect_left(part.positions, first) // self.page
            for page in part.pages[part.freed : unseen]:
                pool.release(page)
            part.freed = max(part.freed, unseen)


def _array(numbers: array) -> Ints:
    """An array without a copy; `numbers` must not grow."""
    return numpy.frombuffer(numbers, numpy.int64)


def _balanced_shares(own: list[int], stored: list[int], rooms: list[int], tokens: int) -> list[int]:
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
