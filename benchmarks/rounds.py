"""Times the cases of a rank in interleaved rounds, each of which starts at one instant on all ranks."""

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.stopwatch import Stopwatch, received_bytes
from tools.netlab import interface_bytes

LEAD = 0.05  # seconds between announcing a start and starting: enough for the message to reach everyone

Run = tuple[dict, Callable[[], object]]  # an entry of the results, to be filled, and what is timed


def interleave(runs: list[Run], rounds: int, warm_up: int, watch: Stopwatch) -> None:
    """Runs all cases in turn, `rounds` times; appends to `rounds` of each entry what `timed` returns on each rank."""
    for _ in range(warm_up):
        for _, action in runs:
            action()
    for number in range(rounds):
        begun = time.perf_counter()
        for entry, action in runs:
            of_ranks: list = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, timed(action, watch))
            entry["rounds"].append(of_ranks)
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {rounds}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)


def timed(action: Callable[[], object], watch: Stopwatch) -> dict[str, float | int | None]:
    """Runs `action` on all ranks, from an instant that they share.

    Returns seconds from that instant until this rank is done, of them `kernel` (in attention blocks), `wait` (for
    communication) and `other`; `late`, how long after the instant this rank began; `received` bytes of payload over all
    its connections, and `link_received`, bytes over its shaped network interface (of all ranks that share it; null
    without one).
    """
    start = common_start()
    watch.seconds.clear()
    payload, link = received_bytes(), interface_bytes().get("shaped")
    time.sleep(max(0.0, start - time.perf_counter()))
    begun = time.perf_counter()
    action()
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
    """An instant in the near future, in seconds of `time.perf_counter`. On Linux it is one clock for all processes.

    A barrier is not enough: on slow links its last message reaches some ranks long after others.
    """
    dist.barrier()
    instant = torch.tensor([time.perf_counter() + LEAD], dtype=torch.float64)
    dist.broadcast(instant, 0)
    return instant.item()
