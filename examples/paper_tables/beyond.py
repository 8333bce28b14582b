"""The predicted choice of this project on each testbed, beside the predicted best of the paper's own system."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.search.candidates import Workload
from megatron.context_parallel.cluster.search.planner import GroupDevices

from .systems import best_of, best_of_all

K = 1024


class Case(NamedTuple):
    """An attention on a part of a testbed.

    Attributes:
        what: in words.
        passes: 1 of inference, which has no backward pass.
        each: devices of a node that share a sequence, where tensor parallelism takes the others; None: all.
    """

    cluster: str
    ranks: int
    what: str
    workload: Workload
    each: int | None = None
    passes: int = 2


def _llama(length: int, kv_heads: int = 32) -> Workload:
    return Workload(length * K, 32, kv_heads, 128)


CASES: dict[str, tuple[Case, ...]] = {
    "attention2d": (
        Case("attention2d-a100", 64, "2.7B, 128K", Workload(128 * K, 32, 32, 80)),
        Case("attention2d-h100", 64, "66B, 128K", Workload(128 * K, 72, 72, 128)),
    ),
    "lightseq": (
        Case("lightseq", 16, "Llama-7B, 64K", _llama(64)),
        Case("lightseq", 16, "Llama-7B, 512K", _llama(512)),
    ),
    "cp_inference": (
        Case("gtt", 16, "one key/value head of 405B, 1M", Workload(1024 * K, 16, 1, 128), each=1, passes=1),
    ),
    "mesh_attention": (
        Case("mesh-attention", 32, "256K", _llama(256)),
        Case("mesh-attention", 32, "1M", _llama(1024)),
    ),
    "loongtrain": (
        Case("loongtrain", 64, "MHA, 128K", _llama(128)),
        Case("loongtrain", 64, "MHA, 1M", _llama(1024)),
        Case("loongtrain", 64, "GQA, 128K", _llama(128, 8)),
        Case("loongtrain", 64, "GQA, 1M", _llama(1024, 8)),
    ),
}


def beyond(paper: str) -> str:
    """A Markdown table: milliseconds of one attention, forward and backward, or forward of inference."""
    lines = ["| testbed | attention | the paper's best | ms | this project would choose | ms | gain |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for case in CASES[paper]:
        place = GroupDevices(_part(load_cluster(case.cluster), case))
        name, own = best_of(paper, case.workload, place, case.passes)
        spec, best = best_of_all(case.workload, place, case.passes)
        if best >= own:
            spec, best = name, own
        cells: Sequence[str] = (
            f"`{case.cluster}`, {case.ranks} GPUs",
            case.what,
            f"`{name}`",
            f"{1e3 * own:.4g}",
            f"`{spec}`",
            f"{1e3 * best:.4g}",
            f"{own / best:.2f}x",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _part(cluster: Cluster, case: Case) -> Cluster:
    if case.each is None:
        return replace(cluster, nodes=case.ranks // cluster.devices_per_node)
    nics = cluster.nics and replace(cluster.nics, per_node=case.each)
    return replace(cluster, nodes=case.ranks // case.each, devices_per_node=case.each, nics=nics, inside=None)
