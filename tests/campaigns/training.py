"""Each family in every parallel layout and strategy: every step has the loss of one rank; minutes.

PYTHONPATH=. python -m pytest tests/campaigns/training.py
"""

from itertools import product

import pytest

from megatron.context_parallel import STRATEGIES
from tests.support import flags_case, training_case
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


@pytest.fixture(scope="module")
def documents(ranks, tmp_path_factory):
    """The flags of a corpus and of the first weights, and how one rank trains with them."""
    data = flags_case.prepare(tmp_path_factory.mktemp("documents"))
    ranks(1, flags_case.save_start, data)
    return data, ranks(1, flags_case.train, data)[0]


@pytest.mark.parametrize("spread", flags_case.SPREADS)
def test_shared_documents(ranks, documents, spread):
    data, one = documents
    for run in ranks(4, flags_case.train, data, flags_case.SPREADS[spread]):
        assert run.losses == pytest.approx(one.losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
