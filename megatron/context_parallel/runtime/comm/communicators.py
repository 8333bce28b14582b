"""The rendezvous of the ranks of a context group, and the communicators that they then create together."""

import hashlib

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.torch_process_groups import default_store, new_process_group, timeout_of

from .flight_recorder import named


def group_of_this_rank(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """`group`, or the group of a one-dimensional mesh; by default the world.

    Raises:
        UsageError: there is no process group, `group` is not one, this rank is not in it, or a mesh has more
            dimensions.
    """
    if not dist.is_initialized():
        raise UsageError(
            "ContextParallel: there is no process group; call torch.distributed.init_process_group() first, or use "
            "AllRanks(n) to run n ranks in this process"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                f"group: a DeviceMesh of {group.ndim} dimensions, {group.mesh_dim_names or tuple(group.shape)}; give "
                'one of them, such as mesh["cp"]'
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            f"group: of type {type(group).__name__}; give a process group, such as dist.new_group([0, 1]), or a "
            "one-dimensional DeviceMesh"
        )
    if dist.get_rank(group) < 0:
        raise UsageError(
            f"ContextParallel: rank {dist.get_rank()} is not in the given group; give a group that contains it"
        )
    return group


def rendezvous(group: dist.ProcessGroup, given: str) -> str:
    """Waits for all ranks of `group` and checks that `given` is the same on all of them.

    Returns:
        A unique name, which is the same on all ranks, even if they have different other groups.

    Raises:
        UsageError: a rank did not join within the timeout of the group, gave up, or has another `given`.
    """
    ranks, rank, timeout = dist.get_process_group_ranks(group), dist.get_rank(), timeout_of(group)
    members = "_".join(map(str, ranks))
    store = dist.PrefixStore(f"context_parallel/{members}", default_store())
    turn = store.add(f"meetings of {rank}", 1)  # counted in the store: it outlives groups, and names must not repeat
    keys = [f"{turn}/{r}" for r in ranks]
    store.set(f"{turn}/{rank}", given)
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        if missing := [r for r, key in zip(ranks, keys, strict=True) if not store.check([key])]:
            store.set(f"{turn}/{rank}", f"gave up waiting for {named(missing)}")  # for ranks that join later
            raise UsageError(
                f"{given} on {named(ranks)}: {named(missing)} did not join within {timeout.total_seconds():g} s; "
                "create ContextParallel on all ranks of its group (a rank that failed prints why in its own output)"
            ) from None
    said = [text.decode() for text in store.multi_get(keys)]
    if len(set(said)) > 1:
        by_text: dict[str, list[int]] = {}
        for r, text in zip(ranks, said, strict=True):
            by_text.setdefault(text, []).append(r)
        raise UsageError(
            "the ranks of a context group need the same strategy, layout and options: "
            + "; ".join(f"{named(who)}: {text}" for text, who in by_text.items())
        )
    return f"{members}/{turn}"


def new_communicator(group: dist.ProcessGroup, ranks: list[int], name: str, channel: str) -> dist.ProcessGroup:
    """A communicator of `ranks` (of the world, all in `group`), with the backend, options and timeout of `group`.

    Exactly these ranks call it.
    """
    name = hashlib.sha256(f"{name} {channel} {ranks}".encode()).hexdigest()
    return new_process_group(group, ranks, f"context_parallel/{name}", f"context parallel {channel}")
