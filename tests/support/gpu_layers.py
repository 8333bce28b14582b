"""The trainer with the configuration of layers and pipelines that it has on a GPU, on a host without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from megatron.context_parallel.trainer.model import build
from tests.support import training_case


@contextmanager
def configured_for_gpu() -> Iterator[None]:
    """Models that are built inside have the fused operations, which run without a compiler, and free sent outputs."""
    configure = build.transformer_config

    def as_on_gpu(args):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            return configure(args)

    with mock.patch.object(build, "transformer_config", as_on_gpu), torch._dynamo.config.patch(disable=True):
        yield


def train(family: str, changes: dict) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of three steps."""
    with configured_for_gpu():
        run = training_case.train(family, train_iters=3, **changes)
    return run.losses, run.grad_norms


def train_plainly(family: str, changes: dict) -> tuple[list[float], list[float]]:
    """The same with the configuration of this host."""
    run = training_case.train(family, train_iters=3, **changes)
    return run.losses, run.grad_norms
