"""`--cp-strategy auto`: the trainer's choice when its job starts, or in a dry run."""

from dataclasses import replace

import torch.distributed as dist

from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.search.auto import choose_on_group, measured
from megatron.context_parallel.cluster.search.planner import GroupDevices, Search, search
from megatron.context_parallel.cluster.search.step_search import workload_of
from megatron.context_parallel.cluster.step.fit import advice
from megatron.context_parallel.cluster.step.memory import ATTENTION, BUFFERS, fullest_stage, moments
from megatron.context_parallel.errors import UsageError, raise_all
from megatron.context_parallel.strategies import AUTO, Choice
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of, run_of

from .check_values import check_together
from .cp_strategy import fixed_options


def choose_strategy(args: Arguments) -> Arguments:
    """`args` with the strategy that rank 0 chooses. All ranks of the job call this together.

    Without `--cp-cluster` they first measure their cluster, which takes a few seconds.

    Raises:
        UsageError: no strategy works for this run; on all ranks.
    """
    world = dist.group.WORLD
    assert world is not None  # the job has begun
    workload = workload_of(model_of(args), run_of(args))
    if args.cp_cluster:
        cluster = load_cluster(args.cp_cluster, "--cp-cluster")
    else:
        announce(f"--cp-strategy {AUTO}: measuring devices and links, which takes some seconds")
        cluster = measured(workload, world)
    announce(f"--cp-strategy {AUTO}: predicting the strategies for {args.world_size} x {cluster.device.name}")
    return with_strategy(args, choose_on_group(world, lambda: planned(args, cluster)))


def with_strategy(args: Arguments, choice: Choice) -> Arguments:
    """`args` with a strategy, as if it had been given."""
    layers = (choice,) * args.num_layers
    args = replace(args, cp_layers=layers, cp_strategy=choice.spec, cp_layout=choice.layout, cp_cluster=None)
    raise_all(check_together(args))
    return args


def planned(args: Arguments, cluster: Cluster) -> Search:
    """The fastest strategy if rank r of the run is device r of the cluster. All context groups run at the same time."""
    run = run_of(args)
    first, *others = run.groups("context")
    place = GroupDevices(cluster.part(run.world_size), first, others)
    return search(workload_of(model_of(args), run), place, fixed_options(args), _room(args, cluster))


def _room(args: Arguments, cluster: Cluster) -> float:
    """Bytes of a device's memory that the rest of the run leaves for attention."""
    model, run = model_of(args), run_of(args)
    found = {moment.name: moment for moment in moments(model, run, fullest_stage(model, run))}
    rest = sum(item.bytes for item in found.pop(ATTENTION).items if item.what != BUFFERS)
    needed = max(rest, *(moment.bytes for moment in found.values()))
    room = cluster.device.memory_GiB * 2**30
    if needed >= room:
        raise UsageError(
            f"--cp-strategy {AUTO}: without attention the run already needs an estimated {needed / 2**30:.3g} GiB per "
            f"device, which has {cluster.device.memory_GiB:g} GiB; "
            f"{advice(model, run, room)}"
        )
    return room - rest
