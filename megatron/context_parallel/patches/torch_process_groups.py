"""Process groups of torch.distributed: their timeout and options, and new groups with a given name.

No public function returns a group's timeout or options. `dist.new_group` derives a name from the number of groups in
the process, so ranks with different numbers of groups would wait for each other forever.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CHECKED = {"torch": "2.11 to 2.15"}

default_store = distributed_c10d._get_default_store  # the store of the world


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of operations of `group`."""
    return _backend_options(group)._timeout


def options_of(group: dist.ProcessGroup) -> Any:
    """Options for another communicator, copied from `group`, if it uses NCCL: stream priority and CTA limits.

    They decide whether communication must wait for a whole compute kernel.
    """
    given = _backend_options(group)
    if not _is_of_nccl(given):
        return None
    own = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.is_high_priority_stream)
    own.config, own._timeout = given.config, given._timeout
    return own


def _device_of(group: dist.ProcessGroup) -> torch.device | None:
    """The device of `group`, if its backend needs that from the start: torch 2.15's for NCCL, which is called NCCL2.

    Without it, a new group takes the device of LOCAL_RANK, or of the rank. Tensors of other devices are then refused.
    """
    kind = getattr(dist, "ProcessGroupNCCL2", None)
    needs_it = kind and any(isinstance(group._get_backend(device), kind) for device in group._device_types)
    return group.bound_device_id if needs_it else None


def _backend_options(group: dist.ProcessGroup) -> Any:
    """Those of NCCL, if a device of the group uses it: a group may have a backend for each ("cpu:gloo,cuda:nccl")."""
    found = [group._get_backend(device).options for device in group._device_types]
    return next((options for options in found if _is_of_nccl(options)), found[0])


def _is_of_nccl(options: Any) -> bool:
    return hasattr(options, "is_high_priority_stream")


def new_process_group(beside: dist.ProcessGroup, ranks: list[int], name: str, description: str) -> dist.ProcessGroup:
    """A group of `ranks` (of the world), with the backend, options and timeout of the group `beside`.

    Exactly these ranks call it, with a `name` that no other group has.
    """
    world = dist.group.WORLD
    assert world is not None
    device = _device_of(beside)
    bound, world.bound_device_id = world.bound_device_id, None  # else NCCL splits the world, by all its ranks
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.get_backend(beside),
            default_store(),
            name,  # type: ignore[arg-type]  # GroupName is a str that few releases have
            backend_options=options_of(beside),
            timeout=timeout_of(beside),
            device_id=device,
            group_desc=description,
        )
    finally:
        world.bound_device_id = bound
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made
