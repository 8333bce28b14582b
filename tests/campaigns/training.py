"""Each family in every parallel layout and strategy: every step has the loss of one rank; minutes.

PYTHONPATH=. python -m pytest tests/campaigns/training.py
"""

from itertools import product

import pytest

from megatron.context_parallel import STRATEGIES
from tests.support import training_case
from tests.support.training_spreads import CP, SPREADS, check_spread, reference  # noqa: F401  # a fixture

SIZES = {"usp": {"head_parallel_size": 2}, "loongtrain": {"head_parallel_size": 2}}
BY_STRATEGY = [(name, layout) for name, strategy in STRATEGIES.items() for layout in strategy.layouts]


@pytest.mark.parametrize(("family", "spread"), [*product(training_case.FAMILIES, SPREADS)])
def test_every_layout(ranks, reference, family, spread):  # noqa: F811
    check_spread(ranks, reference, family, *SPREADS[spread][1:])


@pytest.mark.parametrize(("name", "layout"), BY_STRATEGY)
def test_every_strategy(ranks, reference, name, layout):  # noqa: F811
    options = {"cp_strategy": name, "cp_layout": layout, "cp_options": SIZES.get(name, {})}
    check_spread(ranks, reference, "llama", 4, {CP: 4, **options})
