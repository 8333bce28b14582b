"""The rounds of resized groups by hand."""

import pytest

from benchmarks.resizing import round_of, seconds_of_resizing
from megatron.context_parallel.tokens.place_documents import Costs


def groups(lengths: list[int], ranks: int, most: int) -> tuple[list[tuple[int, list[int]]], list[int]]:
    of_round, left = round_of(lengths, ranks, most)
    return [(group.size, group.documents) for group in of_round], left


def test_long_documents_get_more_ranks():
    # 16 tokens need 2 ranks of 8. The documents of 8 go to the free ranks.
    assert groups([16, 8, 8], 4, 8) == ([(2, [16]), (1, [8]), (1, [8])], [])


def test_what_does_not_fit_waits_for_the_next_round():
    assert groups([32, 32, 32], 8, 8) == ([(4, [32]), (4, [32])], [32])  # taken away again: two are even
    assert groups([32, 16], 4, 8) == ([(4, [32])], [16])


def test_a_group_is_doubled_where_ranks_are_left():
    assert groups([8], 4, 8) == ([(4, [8])], [])
    assert groups([8, 8, 8], 4, 8) == ([(2, [8]), (1, [8]), (1, [8])], [])


def test_a_round_ends_when_all_ranks_have_equal_work():
    # After the documents of 16 on 2 ranks each (128 pairs for a rank) there is no rank for those of 8.
    assert groups([16, 16, 8, 8], 4, 8) == ([(2, [16]), (2, [16])], [8, 8])
    # 128 for each of 2 ranks, and 64 + 64 for the others: balanced, so the rest waits.
    found, left = groups([16, 8, 8, 8, 8, 8, 8], 4, 8)
    assert found == [(2, [16]), (1, [8, 8]), (1, [8, 8])] and left == [8, 8]


def test_seconds_add_up_over_rounds():
    costs = Costs(1.0, row_inside=100.0)
    # Round 1: 136 pairs on 2 ranks, but 8 rows in and 8 rows of gradients out of each; round 2: 36 pairs.
    links, work = 2 * 8 * 100.0, 36.0
    assert seconds_of_resizing([16, 8, 8], 2, 8, costs) == pytest.approx(links + work)
    with pytest.raises(ValueError, match="64 tokens need 8 ranks"):
        seconds_of_resizing([64], 4, 8, costs)
