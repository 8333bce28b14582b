"""How megatron-core saves the inputs of layers that it recomputes.

Its blocks of layers call `tensor_parallel.checkpoint`. They have no option for the memory of the inputs, and other
layers of a block may save tensors as ever.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron.core import tensor_parallel

CHECKED = {"megatron-core": "0.16 to 0.19"}


@contextmanager
def checkpoints_within(context: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Inside, each recomputed part of a model runs forward, and saves its inputs, in a `context()`."""
    module: Any = tensor_parallel
    checkpoint = module.checkpoint

    def within(*args: Any) -> Any:
        with context():
            return checkpoint(*args)

    module.checkpoint = within
    try:
        yield
    finally:
        module.checkpoint = checkpoint
