"""`--cp-strategy auto`: all ranks of a group take the strategy that is predicted to be fastest on their cluster."""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.measure.probe import probe
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.communicators import group_of_this_rank, rendezvous
from megatron.context_parallel.runtime.comm.first_rank import on_first_rank
from megatron.context_parallel.strategies import AUTO, COMMON, Choice, parse_spec, spec_text

from .candidates import DTYPES, Workload
from .plainness import reason
from .planner import GroupDevices, SearchResult, search

logger = logging.getLogger(__name__)


def resolve(
    strategy: str | Choice,
    workload: Workload | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    cluster: Cluster | str | None = None,
    **options: object,
) -> Choice:
    """A strategy for `ContextParallel`: the fastest predicted one for "auto", otherwise the named one.

    All ranks of the group call this together.

    Args:
        strategy: `--cp-strategy`, a spec or "auto".
        workload: the attention that "auto" chooses for.
        group: the ranks that share a sequence, or a DeviceMesh of one dimension; default: the world.
        cluster: for "auto" a description, or a preset or file of one, whose first devices are the ranks of the group;
            None: the ranks measure theirs for some seconds.
        options: `layout`, `head_parallel_size`, `head_rounds`, `placement` and `partials_in_16_bits`, which bind the
            planner; for a named strategy its options too.

    Raises:
        UsageError: no strategy works, or the cluster is unknown, on all ranks; a rank has other arguments, or did not
            join within the group's timeout.
    """
    if strategy != AUTO:
        return parse_spec(strategy, **options)
    group = group_of_this_rank(group)
    given = {"workload": workload, "cluster": cluster, **options}
    rendezvous(group, f"--cp-strategy {spec_text(AUTO, **given)}")  # else ranks with others would wait forever
    if not isinstance(workload, Workload):
        wrong = "" if workload is None else f"; workload is of type {type(workload).__name__}"
        raise UsageError(f"--cp-strategy {AUTO}: for which sizes? Give workload=Workload(length, heads, ...){wrong}")
    if not isinstance(cluster, Cluster | str | None):
        raise UsageError(f"cluster of type {type(cluster).__name__}: give a Cluster, its name or file, or leave it out")
    fixed = {name: option.parse(value) for name, option in COMMON.items() if (value := options.pop(name, None))}
    if options:
        name, value = options.popitem()
        raise UsageError(f"{name}={value}: --cp-strategy {AUTO} chooses the options of strategies; leave it out")
    here = measured(workload, group) if cluster is None else cluster

    def search_on_first_rank() -> SearchResult:
        described = load_cluster(here, "--cp-cluster") if isinstance(here, str) else here
        return search(workload, GroupDevices(described.part(dist.get_world_size(group))), fixed)

    return choose_on_group(group, search_on_first_rank)


def choose_on_group(group: dist.ProcessGroup, search_on_first_rank: Callable[[], SearchResult]) -> Choice:
    """The best choice that the first rank of a group finds, on all of its ranks. They call this together.

    Raises:
        UsageError: as `search_on_first_rank`; on all ranks.
    """

    def best() -> str:
        found = search_on_first_rank()
        logger.info("%s", headline(found))
        return found.best

    return parse_spec(on_first_rank(best, group))


def measured(workload: Workload, group: dist.ProcessGroup) -> Cluster:
    """The cluster that the ranks of `group` are on. They call this together."""
    on_gpu = "nccl" in dist.get_backend_config(group)
    return probe(
        group,
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        dtype=DTYPES[workload.dtype],
        heads=workload.heads,
        kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        quick=True,
    )


def headline(result: SearchResult) -> str:
    """One line: the choice, as a flag that reproduces it, and what was predicted."""
    best, fastest = result.best, next(iter(result.ranked))
    milliseconds = 1e3 * result.ranked[best].seconds
    why = reason(best, fastest, len(result.ranked) + len(result.slower))
    return (
        f"--cp-strategy {AUTO}: chose --cp-strategy {best}; predicted: {milliseconds:.4g} ms of attention per "
        f"layer and micro batch, {why}"
    )
