"""`--cp-strategy auto`: all ranks of a group take the strategy that is predicted to be fastest on their cluster."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.measure.probe import probe
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.strategies import AUTO, Choice, choose

from .candidates import DTYPES, Workload
from .planner import Place, Search, search

logger = logging.getLogger(__name__)


def agree(
    workload: Workload,
    cluster: Cluster | str | None,
    group: dist.ProcessGroup,
    fixed: Mapping[str, Any] | None = None,
) -> Choice:
    """What is fastest for the ranks of a group. They call this together.

    Args:
        workload: the attention.
        cluster: a description, or a preset or file of one, whose first devices are the ranks of the group; None: the
            ranks measure theirs for some seconds.
        group: the ranks that share a sequence.
        fixed: as in `search`.

    Raises:
        UsageError: nothing can run, or there is no such cluster; on all ranks.
    """
    here = measured(workload, group) if cluster is None else cluster

    def on_first_rank() -> Search:
        described = load_cluster(here, "--cp-cluster") if isinstance(here, str) else here
        return search(workload, Place(described.part(dist.get_world_size(group))), fixed)

    return told(group, on_first_rank)


def told(group: dist.ProcessGroup, on_first_rank: Callable[[], Search]) -> Choice:
    """The best that the first rank of a group finds, on all of its ranks. They call this together.

    Raises:
        UsageError: as `on_first_rank`; on all ranks.
    """
    said = [("", "")]
    if dist.get_rank(group) == 0:
        try:
            found = on_first_rank()
            said = [(found.best, "")]
            logger.info("%s", headline(found))
        except UsageError as error:
            said = [("", str(error))]
    dist.broadcast_object_list(said, group_src=0, group=group)
    spec, refusal = said[0]
    if refusal:
        raise UsageError(refusal)
    return choose(spec)


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


def headline(found: Search) -> str:
    """One line: the choice, as a flag that reproduces it, and what was predicted."""
    milliseconds, all_found = 1e3 * found.ranked[found.best].seconds, len(found.ranked) + len(found.slower)
    return (
        f"--cp-strategy {AUTO}: takes --cp-strategy {found.best}; {milliseconds:.4g} ms of attention a layer and micro "
        f"batch predicted, the fastest of {all_found}"
    )
