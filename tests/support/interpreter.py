"""Triton's CPU interpreter in a process of its own, because Triton decides at its import whether to interpret."""

import atexit
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.releases import installed


def _begin() -> None:
    gc.disable()  # it would look at all that is imported, again and again
    atexit.register(os._exit, 0)  # the last of all: the interpreter's end would take seconds
    torch.set_num_threads(1)
    _read_the_language_once()


def _read_the_language_once() -> None:
    """Triton reads all names of its language at each call of a function in a kernel, which takes a third of the time.

    What the first call replaces in the language stays replaced.
    """
    from triton.runtime.interpreter import InterpretedFunction

    first_call, called = InterpretedFunction.__call__, set()

    def call(function: Any, *args: Any, **how: Any) -> Any:
        if function in called:
            return function.rewrite()(*args, **how)
        called.add(function)
        return first_call(function, *args, **how)

    InterpretedFunction.__call__ = call


@contextmanager
def interpreter() -> Iterator[Callable]:
    """Yields what runs `function(*args)` there and returns the result."""
    if installed("triton") < (3, 7) and installed("numpy") >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 fails with numpy 2.4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
        pool.submit(torch.get_num_threads).result()  # starts it
    with pool:
        yield lambda function, *args: pool.submit(function, *args).result()
