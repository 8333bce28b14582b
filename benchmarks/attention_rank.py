"""What each rank of attention.py runs: builds the cases, checks each against exact attention, times them in turn."""

import torch.distributed as dist

from benchmarks.cases import Case, Workload, parse_case
from benchmarks.job import run_job
from benchmarks.rounds import interleave
from benchmarks.stopwatch import Stopwatch
from benchmarks.subjects import ExactAttention, build, local_tensors, step, whole_tensors


def measure(job: dict) -> list[dict]:
    """Rounds of every case that is exact; collective over the world.

    `job` has `problem`, `cases` (as written on the command line), `rounds` and `warm_up`. Returns an entry per case:
    `case`, `error` (relative, on the worst rank) or null, `failure` (why it was not timed) or null, and `rounds`, each
    a list over ranks of what `rounds.timed` returns.
    """
    problem, watch = Workload(**job["problem"]), Stopwatch()
    watch.watch_waits()
    exact = ExactAttention(problem)
    entries, runs = [], []
    for text in job["cases"]:
        subject, error, failure = prepare(parse_case(text), problem, watch, exact)
        entries.append({"case": text, "error": error, "failure": failure, "rounds": []})
        if failure is None:
            tensors = local_tensors(subject, whole_tensors(problem, problem.length))
            runs.append((entries[-1], lambda subject=subject, tensors=tensors: step(subject, *tensors)))
    interleave(runs, job["rounds"], job["warm_up"], watch)
    return entries


def prepare(case: Case, problem: Workload, watch: Stopwatch, exact: ExactAttention) -> tuple:
    """(subject, error, None) of a case that is exact on all ranks, or (None, None, why it is not timed)."""
    group = dist.new_group(
        list(range(problem.ranks))
    )  # a separate group, so that a failing case does not affect others
    subject, error, failure = None, 0.0, None
    try:
        subject = build(case, problem, group, watch)
        error = exact.error_of(subject)
    except Exception as found:  # any error is this case's result
        failure = f"{type(found).__name__}: {found}".splitlines()[0]
    outcomes: list = [None] * problem.ranks
    dist.all_gather_object(outcomes, (error, failure))
    failures = [text for _, text in outcomes if text]
    return (None, None, failures[0]) if failures else (subject, max(error for error, _ in outcomes), None)


if __name__ == "__main__":
    run_job(measure)
