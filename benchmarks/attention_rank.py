"""What each rank of attention.py runs: builds the cases, checks each against exact attention, times them in turn."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.cases import Case, Workload, parse_case
from benchmarks.device import EmulatedDevice
from benchmarks.job import run_job
from benchmarks.rounds import interleave
from benchmarks.stopwatch import Stopwatch
from benchmarks.subjects import ExactAttention, Kernels, build, kernels_of, local_tensors, step, whole_tensors
from megatron.context_parallel.cluster.description import load_cluster
from tools.netlab import Busy

PYTHON = 0.03  # of the time of a block: the most that a step may take in Python
Run = Callable[[], object]


def measure(job: dict) -> list[dict]:
    """Rounds of every case that is exact; collective over the world.

    `job` has `problem`, `cases` (as written on the command line), `rounds`, `warm_up`, and `cluster`, the file of a
    cluster whose devices are emulated, or null. Returns an entry per case: `case`, `error` (relative, on the worst
    rank) or null, `failure` (why it was not timed) or null, `rounds`, each a list over ranks of what `rounds.timed`
    returns, and with devices `python` (see `python_share`).
    """
    problem, watch = Workload(**job["problem"]), Stopwatch()
    watch.watch_waits()
    exact = ExactAttention(problem)
    device = None
    if job["cluster"]:
        described = load_cluster(job["cluster"]).device
        device = EmulatedDevice(described, problem.dtype, problem.head_dim, Busy())
    kernels = kernels_of(problem, watch, device)
    entries, runs = [], []
    for text in job["cases"]:
        subject, error, failure = prepare(parse_case(text), problem, kernels, exact)
        entries.append({"case": text, "error": error, "failure": failure, "rounds": []})
        if failure is None:
            tensors = local_tensors(subject, whole_tensors(problem, problem.length))
            run = partial(step, subject, *tensors)
            if device:
                short = partial(step, subject, *local_tensors(subject, exact.whole))
                entries[-1] |= python_share(short, run, device)
            if entries[-1]["failure"] is None:
                runs.append((entries[-1], run))
    warm_up = job["warm_up"]
    if device:
        device.computes = False
        warm_up = max(0, warm_up - 1)  # `python_share` was one
    interleave(runs, job["rounds"], warm_up, watch)
    return entries


def prepare(case: Case, problem: Workload, kernels: Kernels, exact: ExactAttention) -> tuple:
    """(subject, error, None) of a case that is exact on all ranks, or (None, None, why it is not timed)."""
    group = dist.new_group(
        list(range(problem.ranks))
    )  # a separate group, so that a failing case does not affect others
    subject, error, failure = None, 0.0, None
    try:
        subject = build(case, problem, group, kernels)
        error = exact.error_of(subject)
    except Exception as found:  # any error is this case's result
        failure = f"{type(found).__name__}: {found}".splitlines()[0]
    outcomes: list = [None] * problem.ranks
    dist.all_gather_object(outcomes, (error, failure))
    failures = [text for _, text in outcomes if text]
    return (None, None, failures[0]) if failures else (subject, max(error for error, _ in outcomes), None)


def python_share(short: Run, run: Run, device: EmulatedDevice) -> dict[str, object]:
    """Python's own time of a pass, and its share of the time of the blocks; `failure` if it is more than PYTHON.

    Python's time is the processor time of a pass over the short sequence, in which the device does nothing. Both are
    means over ranks.
    """
    device.computes = False
    short()  # makes the plans
    begun = time.thread_time()
    short()
    python = time.thread_time() - begun
    device.seconds = 0.0
    run()
    device.computes = True
    sums = torch.tensor([python, device.seconds], dtype=torch.float64)
    dist.all_reduce(sums)
    python, blocks = (sums / dist.get_world_size()).tolist()
    return {"python": {"seconds": python, "blocks": blocks}, "failure": refusal(python, blocks)}


def refusal(python: float, blocks: float) -> str | None:
    """Why devices are too fast for Python: its seconds of a pass are too many for the seconds of the blocks."""
    share = python / blocks
    if share <= PYTHON:
        return None
    return (
        f"Python's own time of a pass is {python * 1e3:.1f} ms, {share:.1%} of the {blocks * 1e3:.0f} ms of its blocks "
        f"(at most {PYTHON:.0%}): give devices {share / PYTHON:.1f} times as slow, by a smaller --scale or a longer --stands-for"
    )


if __name__ == "__main__":
    run_job(measure)
