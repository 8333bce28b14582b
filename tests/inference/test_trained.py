"""A trained checkpoint generates over the shared cache the tokens that megatron-core computes without a cache."""

import pytest

from tests.support import trained_case
from tests.support.trained_case import TURNS

NEW = 24  # tokens of an answer: three pages, more than a page for each rank in a conversation


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Its folder, and its conversations."""
    folder = str(tmp_path_factory.mktemp("trained"))
    (losses,) = ranks(1, trained_case.train, folder)
    assert len(losses) >= 100 and losses[-1] < 0.75 * losses[0]
    return folder, ranks(1, trained_case.from_the_start, folder, NEW)[0]


def test_conversations(trained):
    """Answers have 24 tokens per turn, consist of letters, and vary."""
    by_text = [*zip(*TURNS, strict=True)]
    turns = [sum(map(bool, lengths)) for lengths in by_text]
    said = [sum(lengths) for lengths in by_text]
    assert [len(text) for text in trained[1]] == [new * NEW + old for new, old in zip(turns, said, strict=True)]
    assert len({token for text in trained[1] for token in text}) > 20


@pytest.mark.parametrize(
    ("n", "how"),
    [
        (1, {"chunk": 16}),
        (3, {"chunk": 5, "variants": ("pass-q-all-to-all", "pass-kv", "auto")}),
        (4, {"prefill": "pass-q"}),
    ],
)
def test_tokens_are_those_of_megatron_core(ranks, trained, n, how):
    folder, expected = trained
    for found in ranks(n, trained_case.over_the_cache, folder, [how], NEW):
        assert found == [expected]


def test_others_come_and_go(ranks, trained):
    assert max(ranks(2, trained_case.among_others, trained[0], 24)) < 1e-5
