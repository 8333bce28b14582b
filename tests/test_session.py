"""A model over the shared cache gives the tokens that it gives when it computes everything from the start."""

import pytest
import torch
from session_case import greedy, greedy_from_the_start, session, start

TURNS = [[13, 1, 30, 6], [5, 2, 0, 17], [1, 9, 3, 1]]  # new tokens of each sequence, by turn
STEPS = 5


def _reference(positions: str, changes: dict) -> list[list[int]]:
    start()
    return greedy_from_the_start(TURNS, STEPS, positions, **changes)


def _over_the_cache(tensor: int, positions: str, changes: dict, how: list[dict]) -> list:
    start(tensor)
    return [
        greedy(session(positions, changes=changes, prefill=case.pop("prefill", "auto")), TURNS, STEPS, **case)
        for case in how
    ]


PLAIN = [{"prefill": "pass-kv"}, {"prefill": "pass-q"}, {"chunk": 4, "variants": ("pass-kv", "pass-q", "auto")}]


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks(1, _reference, "rope", {})[0]


@pytest.mark.parametrize("n,tensor,how", [(1, 1, PLAIN[2:]), (2, 1, PLAIN[2:]), (3, 1, PLAIN), (4, 1, PLAIN[2:])])
def test_greedy_tokens(ranks, expected, n, tensor, how):
    for texts in ranks(n, _over_the_cache, tensor, "rope", {}, how):
        assert texts == [expected] * len(how)
