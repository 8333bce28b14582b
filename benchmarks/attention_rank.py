"""What each rank of attention.py runs: builds the cases, checks each against exact attention, times them in turn."""

from functools import partial

import torch.distributed as dist

from benchmarks.cases import DTYPES, Case, Workload, parse_case
from benchmarks.device import device_of, python_share
from benchmarks.job import run_job
from benchmarks.rounds import interleave
from benchmarks.stopwatch import Stopwatch
from benchmarks.subjects import ExactAttention, Kernels, build, kernels_of, local_tensors, step, whole_tensors
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.placement_costs import placement_costs
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.tokens.place_documents import Costs


def measure(job: dict) -> list[dict]:
    """Rounds of every case that is exact; collective over the world.

    `job` has `problem`, `cases` (as written on the command line), `rounds`, `warm_up`, and `cluster`, the file of a
    cluster whose devices are emulated, or null. Returns an entry per case: `case`, `error` (relative, on the worst
    rank) or null, `failure` (why it was not timed) or null, `rounds`, each a list over ranks of what `rounds.timed`
    returns, with devices `python` (see `python_share`), and with documents `planned`, the bytes for each rank.
    """
    problem, watch = Workload(**job["problem"]), Stopwatch()
    watch.watch_waits()
    exact = ExactAttention(problem)
    device = device_of(job["cluster"], problem)
    kernels = kernels_of(problem, watch, device)
    costs = costs_of(job["cluster"], problem)
    entries, runs = [], []
    for text in job["cases"]:
        subject, error, failure = prepare(parse_case(text), problem, kernels, exact, costs)
        entries.append({"case": text, "error": error, "failure": failure, "rounds": []})
        if failure is None:
            tensors = local_tensors(subject, whole_tensors(problem, problem.length))
            run = partial(step, subject, *tensors)
            if device:
                short = partial(step, subject, *local_tensors(subject, exact.whole))
                entries[-1] |= python_share(short, run, device)
            if entries[-1]["failure"] is None:
                runs.append((entries[-1], run))
            if problem.documents:
                planned: list = [None] * problem.ranks
                dist.all_gather_object(planned, subject.planned_bytes())
                entries[-1]["planned"] = planned
    warm_up = job["warm_up"]
    if device:
        device.computes = False
        warm_up = max(0, warm_up - 1)  # `python_share` was one
    interleave(runs, job["rounds"], warm_up, watch)
    return entries


def prepare(case: Case, problem: Workload, kernels: Kernels, exact: ExactAttention, costs: Costs) -> tuple:
    """(subject, error, None) of a case that is exact on all ranks, or (None, None, why it is not timed)."""
    group = dist.new_group(
        list(range(problem.ranks))
    )  # a separate group, so that a failing case does not affect others
    subject, error, failure = None, 0.0, None
    try:
        subject = build(case, problem, group, kernels, costs)
        error = exact.error_of(subject)
    except Exception as found:  # any error is this case's result
        failure = f"{type(found).__name__}: {found}".splitlines()[0]
    outcomes: list = [None] * problem.ranks
    dist.all_gather_object(outcomes, (error, failure))
    failures = [text for _, text in outcomes if text]
    return (None, None, failures[0]) if failures else (subject, max(error for error, _ in outcomes), None)


def costs_of(cluster: str | None, problem: Workload) -> Costs:
    """What placed documents cost on a described cluster; without one, messages cost nothing."""
    if cluster is None:
        return Costs(1.0)
    rows = problem.length // problem.ranks
    itemsize = DTYPES[problem.dtype].itemsize
    shape = Shape(rows, problem.heads, problem.kv_heads, problem.head_dim, itemsize)
    return placement_costs(shape, load_cluster(cluster), problem.dtype)


if __name__ == "__main__":
    run_job(measure)
