"""Every way to train a plain PyTorch model with FSDP2, and models of diffusers, against one rank; minutes.

PYTHONPATH=. python -m pytest tests/campaigns/torch_training.py
"""

from itertools import product

import pytest

from tests.support import torch_case
from tests.support.diffusers_case import check, flux, wan
from tests.support.fsdp_case import fsdp_losses, one_rank  # noqa: F401  # a fixture

SPECS = ("ring", "mesh", "lightseq", "ulysses")
DATA = ({}, {"data": 2}, {"data": 2, "hybrid": True})
RECOMPUTE = ("", *torch_case.CHECKPOINTS)


@pytest.mark.parametrize("spec,data,recompute,compiled", [*product(SPECS, DATA, RECOMPUTE, (False, True))])
def test_training_equals_one_rank(ranks, one_rank, spec, data, recompute, compiled):  # noqa: F811
    if compiled and recompute == "reentrant":
        pytest.skip("torch.compile takes non-reentrant checkpoints only")
    for losses in fsdp_losses(ranks, spec, {**data, "recompute": recompute, "compiled": compiled}):
        assert losses == pytest.approx(one_rank, abs=1e-6)


@pytest.mark.parametrize("make,spec", [*product((flux, wan), (*SPECS, "attention2d", "usp:head_parallel_size=2"))])
def test_diffusers_equal_one_rank(ranks, make, spec):
    check(ranks, 4, make, spec)
