"""Many draws of tokens have the probabilities of the model.

python -m pytest tests/campaigns/draws.py
"""

import pytest

from tests.support.draws_case import CASES, shares


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("params", "expected"), CASES)
def test_many_draws_have_the_probabilities_of_the_model(params, expected, seed):
    """The bound is four standard deviations of a probability of a half."""
    assert shares(40_000, seed, **params) == pytest.approx(expected, abs=0.01)
