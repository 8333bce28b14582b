"""The first job of each rank of auto.py: measures the cluster and plans."""

import sys
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.cases import Workload
from benchmarks.job import run_job
from megatron.context_parallel.cluster.description import Cluster, load_cluster, save_cluster
from megatron.context_parallel.cluster.search import candidates
from megatron.context_parallel.cluster.search.auto import measured
from megatron.context_parallel.cluster.search.planner import GroupDevices, search
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.mask import Mask

NEAR = 1.5  # times the predicted best
LEAST = 12  # cases, if there are as many
EVERY = 10**6


def measure(job: dict) -> list[dict]:
    """The choice and the sweep, each a `case` with its `predicted` seconds, or null.

    `job` has `problem`, `cluster` (a name or null), `fixed` options, `cases`, and `described`, where rank 0 writes the
    cluster.
    """
    problem, begun = Workload(**job["problem"]), time.perf_counter()
    sizes = problem.length, problem.heads, problem.kv_heads, problem.head_dim, problem.batch, problem.dtype
    workload = candidates.Workload(*sizes, Mask(problem.causal))
    cluster = load_cluster(job["cluster"]) if job["cluster"] else measured(workload, dist.group.WORLD)
    probed = time.perf_counter() - begun
    if dist.get_rank():
        return []
    save_cluster(cluster, Path(job["described"]))
    cases = sweep(workload, cluster.part(problem.ranks), job["fixed"], job["cases"])
    planned = time.perf_counter() - begun - probed
    print(f"probe {probed:.1f} s, plan {planned:.1f} s", file=sys.stderr, flush=True)
    return [{"case": case, "predicted": seconds} for case, seconds in cases.items()]


def sweep(workload: candidates.Workload, cluster: Cluster, fixed: dict, count: int) -> dict[str, float | None]:
    """The choice and the cases to compare it with, each with its predicted seconds.

    After the choice come the best of every strategy (without a prediction, where a bound says that it is slower), the
    best with each head-parallel size, and others in order, up to `NEAR` times the best; then slower ones up to `LEAST`.
    """
    found = search(workload, GroupDevices(cluster), fixed, max_simulated=EVERY)
    ranked = {spec: prediction.seconds for spec, prediction in found.ranked.items()}
    leaders = dict[object, str]()
    for spec in [*ranked, *found.slower]:
        leaders.setdefault(spec.split(":")[0], spec)
    others = dict[object, str]()
    for spec in (spec for spec, seconds in ranked.items() if seconds <= NEAR * ranked[found.best]):
        choice = parse_spec(spec)
        others.setdefault((choice.strategy.name, choice.common.get("head_parallel_size")), spec)
    near = [spec for spec, seconds in ranked.items() if seconds <= NEAR * ranked[found.best]]
    every = dict.fromkeys([found.best, *leaders.values(), *others.values(), *near])
    for spec in [*ranked, *found.slower]:
        if len(every) >= LEAST:
            break
        every.setdefault(spec)
    return {spec: ranked.get(spec) for spec in list(every)[:count]}


if __name__ == "__main__":
    run_job(measure)
