"""A plain PyTorch model under FSDP2, and the losses of one rank."""

from functools import partial

import pytest

from tests.support import torch_case


@pytest.fixture(scope="module")
def one_rank(ranks) -> list[float]:
    (losses,) = ranks(1, torch_case.train, "ring")
    assert losses[-1] < losses[0] - 0.1
    return losses


def fsdp_losses(ranks, spec: str, how: dict) -> list[list[float]]:
    return ranks(4, partial(torch_case.train, spec, **how))
