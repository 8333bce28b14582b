"""Page tables: how rows are distributed, shared and freed, and which requests are refused."""

import random
from contextlib import suppress

import numpy
import pytest

from megatron.context_parallel import UsageError
from megatron.context_parallel.inference.pages import CacheFull, PageTables


def places(tables: PageTables, sequence: int) -> list[list[int]]:
    return [tables.positions(sequence, rank).tolist() for rank in range(tables.n)]


def room(tables: PageTables, sequence: int) -> int:
    """How many tokens of a sequence fit now, as a refusal says."""
    with pytest.raises(CacheFull) as full:
        tables.add({sequence: tables.capacity + 1})
    return full.value.room


def in_pieces(tables: PageTables, sequence: int, rank: int, first: int) -> list[int]:
    """The slots of the rows from `first` on, as the pieces of `keys` have them."""
    rows, pages = tables.keys(sequence, rank, first)
    whole = [page for piece in pages for page in range(piece.start, piece.stop, piece.step)]
    slots = [slot for piece in rows for slot in range(piece.start, piece.stop)]
    return sorted(slots + [page * tables.page + row for page in whole for row in range(tables.page)])


def check(tables: PageTables, lengths: dict[int, int]) -> None:
    """Each token of each sequence is on one rank, in a slot of its own, and all that is stored is counted."""
    used = [set() for _ in range(tables.n)]
    for sequence, length in lengths.items():
        assert tables.length(sequence) == length
        found = places(tables, sequence)
        assert sorted(x for of in found for x in of) == list(range(length)) and all(x == sorted(x) for x in found)
        for rank in range(tables.n):
            slots = tables.slots(sequence, rank)
            assert len(slots) == len(found[rank]) == tables.count(sequence, rank)
            assert len({*slots.tolist()}) == len(slots)
            for first in (length // 2, length):
                kept = tables.positions(sequence, rank, first)
                assert kept.tolist() == [x for x in found[rank] if x >= first]
                assert tables.slots(sequence, rank, first).tolist() == slots[len(slots) - len(kept) :].tolist()
                assert tables.count(sequence, rank, first) == len(kept)
                assert in_pieces(tables, sequence, rank, first) == sorted(tables.slots(sequence, rank, first).tolist())
            if len(slots):
                assert tables.last_slot(sequence, rank) == slots[-1]
            used[rank] |= {*slots.tolist()}
    assert tables.rows() == [len(slots) for slots in used]


def test_a_prompt_is_dealt_as_slices_from_both_ends():
    tables = PageTables(4, 8, 4)
    first, short, one = tables.open(), tables.open(), tables.open()
    assert tables.add({first: 24}) == {first: [6, 6, 6, 6]}
    assert places(tables, first)[1] == [3, 4, 5, 18, 19, 20]
    assert tables.add({first: 10, short: 3}) == {first: [3, 3, 2, 2], short: [1, 0, 1, 1]}  # the least full
    assert places(tables, first)[0][6:] == [24, 25, 33] and places(tables, first)[2][6:] == [28, 31]
    assert tables.add({one: 1, short: 1}) == {one: [0, 1, 0, 0], short: [0, 1, 0, 0]}
    check(tables, {first: 34, short: 4, one: 1})


def test_sequences_share_no_row_with_a_page_of_others():
    tables = PageTables(2, 16, 4)
    a, b = tables.open(), tables.open()
    for _ in range(5):
        tables.add({a: 1, b: 1})
    check(tables, {a: 5, b: 5})
    pages_of_a = {int(slot) // 4 for slot in tables.slots(a, 0)}
    pages_of_b = {int(slot) // 4 for slot in tables.slots(b, 0)}
    assert not pages_of_a & pages_of_b
    assert tables.keys(a, 0, 5) == ([], []) and tables.keys(a, 0) == ([slice(0, 3)], [])
    assert a in tables and b + 1 not in tables
    tables.add({a: 4, b: 4})
    assert tables.keys(a, 0) == ([slice(0, 5)], [])  # b does not have the page after
    tables.free(b)
    check(tables, {a: 9})


def test_pages_at_equal_distances_are_one_piece():
    tables = PageTables(1, 9, 4)
    others = [tables.open() for _ in range(9)]
    for sequence in others:
        tables.add({sequence: 4})
    for page in (0, 2, 4, 6):
        owner = next(s for s in others if s in tables and tables.last_slot(s, 0) // 4 == page)
        tables.free(owner)
    scattered = tables.open()
    tables.add({scattered: 15})
    assert tables.keys(scattered, 0) == ([slice(24, 27)], [slice(0, 6, 2)])
    assert tables.keys(scattered, 0, 2) == ([slice(2, 4), slice(24, 27)], [slice(2, 6, 2)])
    assert tables.keys(scattered, 0, 9) == ([slice(17, 20), slice(24, 27)], [])


def test_the_space_behind_a_sequence_that_grows_stays_free():
    tables = PageTables(1, 7, 4)
    others = [tables.open() for _ in range(7)]
    for sequence in others:
        tables.add({sequence: 4})
    owner = {tables.last_slot(s, 0) // 4: s for s in others}
    for page in (1, 2):
        tables.free(owner[page])
    grows = tables.open()
    tables.add({grows: 4})
    assert tables.keys(grows, 0) == ([slice(4, 8)], [])
    for page in (3, 5, 6):
        tables.free(owner[page])  # now 2 and 3, behind it, and 5 and 6 are free
    short = tables.open()
    tables.add({short: 4})
    tables.add({grows: 4})
    assert tables.keys(grows, 0) == ([slice(4, 12)], []) and tables.keys(short, 0) == ([slice(20, 24)], [])


def test_balance_while_sequences_come_and_go():
    """Ranks differ by a few rows over 1,000 steps of decode, and each sequence by one."""
    draw, tables, lengths = random.Random(1), PageTables(8, 2000), dict[int, int]()
    widest = 0
    for step in range(1000):
        if len(lengths) < 4 or (len(lengths) < 48 and draw.random() < 0.1):
            sequence = tables.open()
            lengths[sequence] = draw.choice((1, 3, 14, 65, 800, 2000))
            tables.add({sequence: lengths[sequence]})
        if len(lengths) > 4 and draw.random() < 0.08:
            gone = draw.choice([*lengths])
            tables.free(gone)
            del lengths[gone]
        tables.add({sequence: 1 for sequence in lengths})
        lengths = {sequence: length + 1 for sequence, length in lengths.items()}
        widest = max(widest, max(tables.rows()) - min(tables.rows()))
        if step % 250 == 0:
            check(tables, lengths)
        for sequence in lengths:
            counts = [tables.count(sequence, rank) for rank in range(8)]
            assert max(counts) - min(counts) <= 1
    assert widest <= 8


def test_one_long_sequence_fills_all_pages():
    """More than 99% of what n ranks hold, in one piece or in turns; many short ones leave part of a page each."""
    tables = PageTables(8, 16)
    long = tables.open()
    assert tables.room() == room(tables, long) == tables.capacity == 8 * 16 * 64
    tables.add({long: 5000})
    assert room(tables, long) == tables.capacity - 5000 and tables.room() == (16 * 8 - 8 * 10) * 64
    with pytest.raises(CacheFull, match=r"^sequence 1: 3193 new tokens, but the cache has space for 3192; free "):
        tables.add({long: 3193})
    tables.add({long: 3192})
    assert room(tables, long) == tables.room() == 0 and tables.rows() == [1024] * 8
    check(tables, {long: 8192})


def test_ranks_take_more_where_others_are_full():
    tables = PageTables(2, 2, 4)
    a, b = tables.open(), tables.open()
    tables.add({a: 1})  # takes a page of one rank
    assert room(tables, b) == 12
    assert tables.add({b: 12}) == {b: [4, 8]}
    check(tables, {a: 1, b: 12})
    assert room(tables, b) == 0 and room(tables, a) == 3 and tables.room() == 0


def test_what_does_not_fit_changes_nothing():
    tables = PageTables(2, 4, 4)
    a, b = tables.open(), tables.open()
    tables.add({a: 5})
    before = places(tables, a), tables.rows(), tables.room()
    with pytest.raises(
        CacheFull, match=r"^sequence 2: 20 new tokens, .* space for 16; .*--cache-tokens 40$"
    ) as refused:
        tables.add({a: 10, b: 20})
    assert refused.value.room == 16
    assert (places(tables, a), tables.rows(), tables.room()) == before
    for page in (0, 65):
        with pytest.raises(UsageError, match=f"1 pages of {page} rows: need 1 page or more of 1 to 64 rows"):
            PageTables(2, 1, page)


def test_forks_share_full_pages():
    tables = PageTables(2, 8, 4)
    a = tables.open()
    tables.add({a: 21})
    before = tables.room()
    b, copies = tables.fork(a, 20)  # 10 rows of each rank, of which 8 are in full pages
    assert all(copy is not None and copy[0] != copy[1] for copy in copies)
    assert tables.room() == before - 8
    for of_a, of_b in zip(places(tables, a), places(tables, b), strict=True):
        assert of_b == [x for x in of_a if x < 20]
    for rank, copy in enumerate(copies):
        assert tables.slots(b, rank)[:8].tolist() == tables.slots(a, rank)[:8].tolist()
        assert {slot // 4 for slot in tables.slots(b, rank)[8:].tolist()} == {copy[1]}
        assert int(tables.slots(a, rank)[8]) // 4 == copy[0]
    check(tables, {a: 21, b: 20})
    tables.add({a: 3, b: 6})
    check(tables, {a: 24, b: 26})
    tables.free(a)
    check(tables, {b: 26})
    c, copies = tables.fork(b, 0)
    assert copies == [None, None] and tables.length(c) == 0
    tables.free(b)
    tables.free(c)
    assert tables.room() == tables.capacity and tables.rows() == [0, 0]
    with pytest.raises(UsageError, match="fork of 3 tokens of sequence 4: it has 2; give at most that"):
        d = tables.open()
        tables.add({d: 2})
        tables.fork(d, 3)


def test_a_fork_for_which_no_page_is_left_is_refused():
    tables = PageTables(2, 1, 4)
    a = tables.open()
    tables.add({a: 7})
    with pytest.raises(CacheFull, match="fork of 6 tokens of sequence 1: no page is left to copy"):
        tables.fork(a, 6)
    assert tables.rows() == [4, 3] and room(tables, a) == 1


def test_pages_outside_a_window_are_freed():
    """Window 5, pages of 4 on 2 ranks: of 40 tokens, the next one sees the last 5."""
    tables = PageTables(2, 8, 4, window=5)
    old, first = tables.open(), tables.open()
    tables.add({old: 40})
    assert tables.fork(old, 39)[0] == 3 and tables.room() == 64 - 40 - 4  # one page is copied
    tables.free(3)
    for rows in (1, 1, 1, 2):
        tables.add({old: rows})
    kept = [tables.slots(old, rank, 40).tolist() for rank in range(2)]
    tables.trim(old)
    tables.trim(old)
    assert [part.freed for part in tables._rank_rows[old]] == [5, 5] and tables.room() == 64 - 2 * 4
    assert tables.length(old) == 45 and [tables.slots(old, rank, 40).tolist() for rank in range(2)] == kept
    assert tables.holds(old, 45) and not tables.holds(old, 36)
    with pytest.raises(UsageError, match=r"fork of 36 tokens of sequence 1: keys .* were freed; give 45"):
        tables.fork(old, 36)
    tables.add({first: room(tables, first) - 16})
    twin = tables.fork(old, 45)[0]
    tables.add({old: 2, twin: 2})  # the freed pages are in use, and both have pages of their own
    used = [tables.slots(s, rank, f).tolist() for s, f in ((first, 0), (old, 40), (twin, 45)) for rank in range(2)]
    for rank in range(2):
        mine = [slot for part in used[rank::2] for slot in part]
        assert len(mine) == len({*mine})
    for sequence in (first, old, twin):
        tables.free(sequence)
    assert tables.room() == 64 and tables.rows() == [0, 0]
    whole = PageTables(1, 4, 4)
    sequence = whole.open()
    whole.add({sequence: 16})
    whole.trim(sequence)
    assert whole.room() == 0 and whole.holds(sequence, 1)


def test_random_lives():
    """Random valid requests on tables that are often full."""
    for seed in range(30):
        draw = random.Random(seed)
        n = draw.choice((1, 2, 3, 5))
        tables, lengths = PageTables(n, draw.choice((3, 10)), draw.choice((1, 3, 8))), dict[int, int]()
        for _ in range(60):
            match draw.choice(["open", "add", "add", "add", "fork", "free"]):
                case "open":
                    lengths[tables.open()] = 0
                case "add" if lengths:
                    new = {s: draw.randint(1, 20) for s in draw.sample([*lengths], draw.randint(1, len(lengths)))}
                    try:
                        tables.add(new)
                    except CacheFull as full:
                        assert full.room < max(new.values())
                    else:
                        lengths |= {s: lengths[s] + count for s, count in new.items()}
                case "fork" if lengths:
                    source = draw.choice([*lengths])
                    cut = draw.randint(0, lengths[source])
                    with suppress(CacheFull):
                        lengths[tables.fork(source, cut)[0]] = cut
                case "free" if lengths:
                    gone = draw.choice([*lengths])
                    tables.free(gone)
                    del lengths[gone]
            check(tables, lengths)
        for sequence in lengths:
            tables.free(sequence)
        assert tables.rows() == [0] * n and tables.room() == tables.capacity


def test_positions_are_not_those_of_the_tables():
    """Returned tables may be kept: they do not grow with the sequence."""
    tables = PageTables(1, 4, 4)
    a = tables.open()
    tables.add({a: 2})
    before = tables.positions(a, 0)
    tables.add({a: 2})
    assert before.tolist() == [0, 1] and before.dtype == numpy.int64
