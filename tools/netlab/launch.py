"""Starting the ranks of a job, and ranks on plain loopback."""

import functools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Self

from megatron.context_parallel.errors import UsageError

ENVIRONMENT = {  # of ranks, where the caller's has not these
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that the addresses of a lab have no host names
    "MALLOC_MMAP_THRESHOLD_": str(2**32),  # glibc keeps freed tensors: fresh pages cost as much as a copy
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
LAUNCHER = Path(__file__).with_name("launch_ranks.py")
MAX_RANKS = 256


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that `with` and `finally` clean up. Handlers already set stay."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


def launch(ranks: list[dict], command: Sequence[str | Path]) -> None:
    """Runs a Python script with its arguments in all ranks and waits for them.

    Raises UsageError when there is no such script, subprocess.CalledProcessError when a rank fails: its error is then
    on stderr and the other ranks are gone. Whatever ends this call, no rank is left.
    """
    command = [str(word) for word in command]
    if not Path(command[0]).is_file():
        raise UsageError(f"CMD {command[0]}: no such file; give a Python script and its arguments")
    process = subprocess.Popen(
        [sys.executable, str(LAUNCHER)],
        stdin=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **os.environ},
    )
    try:
        with process.stdin as pipe:
            json.dump({"parent": os.getpid(), "command": command, "ranks": ranks}, pipe)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status:
        raise subprocess.CalledProcessError(status, command)


def exits_as_ranks_did(main: Callable[..., int | None]) -> Callable[..., int | None]:
    """`main(argv)` that returns the status of the rank that failed, which printed its error; 128 + n for signal n."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int | None:
        try:
            return main(argv)
        except subprocess.CalledProcessError as error:
            return error.returncode if error.returncode > 0 else 128 - error.returncode
        except KeyboardInterrupt:
            return 128 + signal.SIGINT

    return run


def describe(nodes: int, ranks_per_node: int, **link: str | int | None) -> dict:
    """A cluster as plain data, to be stored beside results. Rates in bit/s, sizes in bytes; None: no such limit."""
    shape = {"nodes": nodes, "ranks_per_node": ranks_per_node}
    limits = ("nic", "fair", "rate_bits_per_second", "burst_bytes", "queue_ms", "mtu", "congestion_control")
    no_link = dict.fromkeys(limits)
    return shape | no_link | link | {"kernel": platform.release(), "cpus": len(os.sched_getaffinity(0))}


def rank_environment(rank: int, nodes: int, ranks_per_node: int, address: str, port: int, interface: str) -> dict:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
    }


def free_port() -> int:
    """A port of loopback that the system gives nobody else meanwhile: it is not in the range that it picks from."""
    while True:
        port = SystemRandom().randrange(20000, 32000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Loopback:
    """Ranks on this host's loopback, without root, namespaces or rates. Raises UsageError for a size that cannot be."""

    ranks: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise UsageError(f"--ranks {self.ranks}: give 1 to {MAX_RANKS}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, command: Sequence[str | Path]) -> None:
        """See `launch`."""
        port = free_port()
        environments = [rank_environment(rank, 1, self.ranks, "127.0.0.1", port, "lo") for rank in range(self.ranks)]
        launch([{"namespace": None, "environment": environment} for environment in environments], command)

    def describe(self) -> dict:
        """See `describe`."""
        return describe(1, self.ranks)
