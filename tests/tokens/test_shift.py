"""Moves of the numbers of ranks and chunks, modulo n and along the diagonals of a square."""

import pytest

from megatron.context_parallel.tokens.shift import Shift


@pytest.mark.parametrize("shift", [Shift(12, 4), Shift(16, 8, 4), Shift(16, 4, 4), Shift(5, 5)])
def test_the_first_numbers_stand_for_all(shift):
    for number in range(shift.n):
        assert shift.representative(number) < shift.period
        assert shift.moved(shift.representative(number), -shift.way_back(number)) == number
    for by in range(-shift.n, shift.n + 1, shift.period):
        moved = [shift.moved(number, by) for number in range(shift.n)]
        assert sorted(moved) == [*range(shift.n)]
        for bits in (0b1011, 1, (1 << shift.n) - 1):
            expected = sum(1 << moved[i] for i in range(shift.n) if bits >> i & 1)
            assert shift.moved_bits(bits, by) == expected


def test_a_move_in_a_square_changes_row_and_column():
    shift = Shift(16, 4, 4)
    assert [shift.moved(number, 4) for number in (0, 1, 3, 15)] == [5, 6, 4, 0]
