"""`--cp-strategy auto`: the trainer's choice when its job starts, or in a dry run."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.cluster.description import Cluster, for_tensors, load_cluster
from megatron.context_parallel.cluster.search.auto import headline, measured
from megatron.context_parallel.cluster.search.documents import DocumentsChoice, search_documents
from megatron.context_parallel.cluster.search.layer_search import search_layers
from megatron.context_parallel.cluster.search.planner import GroupDevices, search
from megatron.context_parallel.cluster.search.step_search import workload_of
from megatron.context_parallel.cluster.step.fit import advice
from megatron.context_parallel.cluster.step.memory import fullest, moments
from megatron.context_parallel.cluster.step.moment import ATTENTION, BUFFERS
from megatron.context_parallel.errors import UsageError, raise_all
from megatron.context_parallel.runtime.comm.first_rank import on_first_rank
from megatron.context_parallel.strategies import AUTO, parse_spec
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of, run_of

from .check_values import check_placement, check_together
from .cp_strategy import fixed_options

logger = logging.getLogger(__name__)


class Decision(NamedTuple):
    """What was chosen, and a line that says so."""

    choice: DocumentsChoice
    line: str


def choose_strategy(args: Arguments, batches: Sequence[Documents] = ()) -> Arguments:
    """`args` with the strategy that rank 0 chooses. All ranks of the job call this together.

    Without `--cp-cluster` they first measure their cluster, which takes a few seconds. `batches`: as in `planned`.

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
    choice, line = on_first_rank(lambda: planned(args, cluster, batches), world)
    if args.rank == 0:
        logger.info("%s", line)
    args = with_strategy(args, choice)
    return replace(args, cp_measured=cluster) if choice.placed and not args.cp_cluster else args


def with_strategy(args: Arguments, chosen: DocumentsChoice) -> Arguments:
    """`args` with a strategy, and a placement or not, as if they had been given."""
    choice = parse_spec(chosen.spec)
    args = replace(
        args,
        cp_layers=(choice,) * args.num_layers,
        cp_strategy=choice.spec,
        cp_layout=choice.layout,
        cp_place_documents=chosen.placed,
        cp_cluster=args.cp_cluster if chosen.placed else None,
    )
    raise_all(check_together(args))
    return args


def planned(args: Arguments, cluster: Cluster, batches: Sequence[Documents] = ()) -> Decision:
    """The fastest strategy if rank r of the run is device r of the cluster. All context groups run at the same time.

    `batches`: the documents of some micro batches, if the data are packed documents. Then it is the fastest for them,
    and batches may get placements of their own.
    """
    model, run, fixed, room = model_of(args), run_of(args), fixed_options(args), _room(args, cluster)
    first, *others = run.groups("context")
    place = GroupDevices(cluster.part(run.world_size), first, others)
    if 0 < model.full_layers < model.num_layers:
        found = search_layers(model, run, place, fixed, room)
    else:
        found = search(workload_of(model, run), place, fixed, room)
    without_documents = DocumentsChoice(found.best, args.cp_place_documents)
    if not batches or run.context_parallel_size == 1:
        return Decision(without_documents, headline(found))
    placing = [True] if args.cp_place_documents else [False]
    if not args.cp_place_documents and not any(check_placement(args)):
        placing.append(True)
    of_documents = search_documents(model, run, cluster, [*found.ranked], batches, fixed, room, placing)
    return Decision(of_documents.best, of_documents.headline)


def _room(args: Arguments, cluster: Cluster) -> float:
    """Bytes of a device's memory that the rest of the run leaves for attention."""
    model, run = model_of(args), run_of(args)
    needed = rest = 0
    for moment in moments(model, run, fullest(model, run)[0]):
        without = sum(item.bytes for item in moment.items if item.what != BUFFERS)
        if moment.name == ATTENTION:  # of FSDP2 there are several
            rest = max(rest, without)
        needed = max(needed, without if moment.name == ATTENTION else moment.bytes)
    room = for_tensors(cluster.device.memory_GiB)
    if needed >= room:
        raise UsageError(
            f"--cp-strategy {AUTO}: without attention the run already needs an estimated {needed / 2**30:.3g} GiB per "
            f"device, which has {room / 2**30:.3g} GiB for tensors; "
            f"{advice(model, run, room)}"
        )
    return room - rest
