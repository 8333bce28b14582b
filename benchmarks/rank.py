"""What each rank of a benchmark runs: builds the cases, checks each against exact attention, times them in turn.

    rank.py JOB RESULTS

JOB is a JSON file with `problem`, `cases` (as written on the command line), `rounds` and `warm_up`; rank 0 writes
RESULTS, a list with an entry per case.
"""

import json
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases import Case, Problem, parse_case
from benchmarks.stopwatch import Stopwatch, received_bytes
from benchmarks.subjects import ExactAttention, build, local_tensors, step, whole_tensors
from tools.netlab import interface_bytes

LEAD = 0.05  # seconds between announcing a start and starting: enough for the message to reach everyone


def measure(problem: Problem, cases: list[Case], rounds: int, warm_up: int) -> list[dict]:
    """Rounds of every case that is exact, interleaved; collective over the world. Returns an entry per case:

    `case`, `error` (relative, on the worst rank) or null, `failure` (why it was not timed) or null, and `rounds`, each
    a list over ranks of what `timed` returns.
    """
    watch = Stopwatch()
    watch.watch_waits()
    exact = ExactAttention(problem)
    entries, runs = [], []
    for case in cases:
        subject, error, failure = prepare(case, problem, watch, exact)
        entries.append({"case": case.text, "error": error, "failure": failure, "rounds": []})
        if failure is None:
            runs.append((entries[-1], subject, local_tensors(subject, whole_tensors(problem, problem.length))))
    for _, subject, tensors in runs:
        for _ in range(warm_up):
            step(subject, *tensors)
    for number in range(rounds):
        begun = time.perf_counter()
        for entry, subject, tensors in runs:
            of_ranks: list = [None] * problem.ranks
            dist.all_gather_object(of_ranks, timed(subject, tensors, watch))
            entry["rounds"].append(of_ranks)
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {rounds}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    return entries


def prepare(case: Case, problem: Problem, watch: Stopwatch, exact: ExactAttention) -> tuple:
    """(subject, error, None) of a case that is exact on all ranks, or (None, None, why it is not timed)."""
    group = dist.new_group(list(range(problem.ranks)))  # its own, so that a case that fails leaves the others' alone
    subject, error, failure = None, 0.0, None
    try:
        subject = build(case, problem, group, watch)
        error = exact.error_of(subject)
    except Exception as problem_found:
        failure = f"{type(problem_found).__name__}: {problem_found}".splitlines()[0]
    outcomes: list = [None] * problem.ranks
    dist.all_gather_object(outcomes, (error, failure))
    failures = [text for _, text in outcomes if text]
    return (None, None, failures[0]) if failures else (subject, max(error for error, _ in outcomes), None)


def timed(subject: object, tensors: list[torch.Tensor], watch: Stopwatch) -> dict[str, float | int | None]:
    """One forward and backward pass, from an instant that all ranks share.

    Returns seconds from that instant until this rank is done, of them `kernel` (in blocks), `wait` (for communication)
    and `other`; `late`, how long after the instant this rank began; `received` bytes of payload over all its
    connections, and `link_received`, bytes over its shaped network interface (of all ranks that share it; null without).
    """
    start = common_start()
    watch.seconds.clear()
    payload, link = received_bytes(), interface_bytes().get("shaped")
    time.sleep(max(0.0, start - time.perf_counter()))
    begun = time.perf_counter()
    step(subject, *tensors)
    seconds = time.perf_counter() - start
    kernel, wait = watch.seconds["kernel"], watch.seconds["wait"]
    received = received_bytes() - payload
    dist.barrier()  # the interface is shared: everyone's bytes have come
    return {
        "seconds": seconds,
        "kernel": kernel,
        "wait": wait,
        "other": seconds - kernel - wait,
        "late": begun - start,
        "received": received,
        "link_received": interface_bytes()["shaped"].received - link.received if link else None,
    }


def common_start() -> float:
    """An instant soon, in seconds of `time.perf_counter`, which on Linux is one clock for all processes of a machine.

    A barrier would not do: on slow links its last message reaches some ranks long after others.
    """
    dist.barrier()
    instant = torch.tensor([time.perf_counter() + LEAD], dtype=torch.float64)
    dist.broadcast(instant, 0)
    return instant.item()


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\b")  # what torch says about itself, once per rank
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    cases = [parse_case(text) for text in job["cases"]]
    entries = measure(Problem(**job["problem"]), cases, job["rounds"], job["warm_up"])
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(entries))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
