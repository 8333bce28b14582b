"""Work that one rank of a group does for all of them, and outcomes that all of them share."""

from collections.abc import Callable, Mapping
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


def check_alike(given: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Reject settings in which a rank of `group` (default: the world) differs from its first one.

    Args:
        given: what this rank has of each setting, which all ranks name alike.

    Raises:
        UsageError: one differs; every rank raises the same.
    """
    first, *others = of_all_ranks(dict(given), group)
    for name, wanted in first.items():
        for rank, values in enumerate(others, 1):
            if values[name] != wanted:
                where = f"{wanted} on rank 0 of the group, {values[name]} on rank {rank}"
                raise UsageError(f"{name}: {where}; give all ranks the same")


def raise_alike(error: Exception) -> NoReturn:
    """Raise the error of one rank on all ranks; an OSError becomes a DiskError."""
    if isinstance(error, OSError):
        raise DiskError(*error.args, error.filename) if error.errno else DiskError(*error.args)
    raise error
