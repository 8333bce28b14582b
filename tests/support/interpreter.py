"""Triton's CPU interpreter in a process of its own, because Triton decides at its import whether to interpret."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tests.support.releases import installed


@contextmanager
def interpreter() -> Iterator[Callable]:
    """Yields what runs `function(*args)` there and returns the result."""
    if installed("triton") < (3, 7) and installed("numpy") >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 fails with numpy 2.4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(torch.set_num_threads, 1).result()  # starts it
    with pool:
        yield lambda function, *args: pool.submit(function, *args).result()
