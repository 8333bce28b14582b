"""Calls that a pretended GPU takes: events, and the arguments of operators and of launches of Triton's kernels."""

import time
from typing import Any

from torch import Tensor


class Event:
    """As `torch.cuda.Event`: complete at once."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


def all_arguments(op: Any, args: tuple, how: dict) -> tuple:
    """The arguments of a call of an operator, in the order of its schema. PyTorch leaves out defaults."""
    given = {x.name: x.default_value for x in op._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | how
    return tuple(given.values())


def arguments_of_launch(kernel: Any, args: tuple, how: dict, grid: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of a launch of a Triton kernel, by name.

    Raises:
        ValueError: a tensor of the host.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | how
    for name, x in given.items():
        if isinstance(x, Tensor) and not x.is_cuda:
            raise ValueError(
                f"Pointer argument {name} of {kernel.__name__} cannot be accessed from Triton (cpu tensor?)"
            )
    assert min(grid) > 0, (kernel.__name__, grid)
    return given
