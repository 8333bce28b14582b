"""Work that one rank of a group does for all of them, and outcomes that all of them share."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from megatron.context_parallel.errors import UsageError

Result = TypeVar("Result")


class DiskError(OSError):
    """An OSError of one rank, which all ranks raise."""


def on_first_rank(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Runs `work` on the first rank of `group` (default: the world), and returns its result on every rank, together.

    Raises:
        UsageError, DiskError: `work` raised it, or another OSError; every rank raises the same.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = work()
        except (UsageError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise_alike(outcome[1])
    return outcome[0]


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The `value` of each rank of `group` (default: the world), in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_alike(error: Exception) -> NoReturn:
    """Raise the error of one rank on all ranks; an OSError becomes a DiskError."""
    if isinstance(error, OSError):
        raise DiskError(*error.args, error.filename) if error.errno else DiskError(*error.args)
    raise error
