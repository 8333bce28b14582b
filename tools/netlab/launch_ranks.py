"""Forks the ranks of a job from one process that has imported torch. Started by launch.py, not by hand.

The job comes on stdin as JSON: `parent`, the process that started it; `command`, a Python script and its arguments;
`ranks`, for each its environment and the file of its network namespace or null.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import IO, NoReturn

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
libc = ctypes.CDLL(None, use_errno=True)


def stop(number: int, frame: object) -> None:
    for again in SIGNALS:  # cleaning up must not be interrupted
        signal.signal(again, signal.SIG_IGN)
    sys.exit(128 + number)


def die_with(parent: int, number: int) -> None:
    """The kernel sends this process the signal when its parent dies, however it dies."""
    libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def enter(namespace: str) -> None:
    """Moves the calling thread to a network namespace. Threads it starts later are there too; older ones stay."""
    with open(namespace) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace", namespace)


def describe(error: BaseException, script: str) -> str:
    """The traceback that Python would print, without the frames of this launcher."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def run_script(place: dict, command: list[str]) -> tuple[int, str]:
    """Runs the script as `python` would, in its namespace; returns exit status and words about a failure."""
    try:
        os.environ.update(place["environment"])
        if place["namespace"]:
            enter(place["namespace"])
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        if error.code is not None:
            return (error.code, "") if isinstance(error.code, int) else (1, f"{error.code}\n")
    except BaseException as error:
        return 1, describe(error, command[0])
    return 0, ""


def be_rank(place: dict, command: list[str], launcher: int, report: IO[str]) -> NoReturn:
    """The code of a forked process. A failure is written to the report and ends the process at once.

    Its peers see its connections close only after that, so their errors are always later.
    """
    status = 1
    try:
        die_with(launcher, signal.SIGKILL)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        sys.stdout.reconfigure(line_buffering=True)
        code, words = run_script(place, command)
        if code:
            json.dump([time.monotonic(), words], report)
            report.flush()
        else:
            threading._shutdown()
            atexit._run_exitfuncs()
        sys.stdout.flush()
        status = code & 0xFF or bool(code)
    except BaseException:
        traceback.print_exc()
    finally:
        # As multiprocessing ends a forked process; tearing down the interpreter and torch takes 0.5 s of CPU per rank.
        os._exit(status)


def start(job: dict, ranks: dict[int, tuple[int, IO[str]]]) -> None:
    """Forks all ranks and adds them to `ranks`: process -> (rank, report)."""
    launcher = os.getpid()
    gc.freeze()  # or collecting in a rank copies the pages it shares
    for rank, place in enumerate(job["ranks"]):
        report = tempfile.TemporaryFile("w+")  # noqa: SIM115
        process = os.fork()
        if process == 0:
            be_rank(place, job["command"], launcher, report)
        os.setpgid(process, process)  # a group of its own: Ctrl-C does not reach it, and its children die with it
        ranks[process] = rank, report


def reap(process: int) -> int:
    """Kills the children of an ended rank. Returns its exit status (minus the signal that killed it)."""
    os.killpg(process, signal.SIGKILL)  # before the wait: until then no one else can get this number
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def wait(ranks: dict[int, tuple[int, IO[str]]]) -> list[tuple[float, int, int, str]]:
    """Waits until a rank has failed or all are done, and removes what has ended from `ranks`.

    Returns the failures of one instant: (when, rank, exit status, words), the cause first. Who was killed by a signal
    left no time and comes before whoever noticed.
    """
    failures = []
    while ranks and not failures:
        ended = {os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid}
        ended |= {p for p in ranks if os.waitid(os.P_PID, p, os.WEXITED | os.WNOWAIT | os.WNOHANG)}
        for process in ended:
            rank, report = ranks.pop(process)
            if status := reap(process):
                report.seek(0)
                failures.append((*json.loads(report.read() or "[0, null]"), rank, status))
    return sorted((when, rank, status, words) for when, words, rank, status in failures)


def tell(rank: int, status: int, words: str | None) -> None:
    how = f"failed with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
    print(f"netlab: rank {rank} {how}; the other ranks were stopped\n{words or ''}", end="", file=sys.stderr)


def main() -> int:
    job = json.load(sys.stdin)
    for number in SIGNALS:
        signal.signal(number, stop)
    ranks: dict[int, tuple[int, IO[str]]] = {}
    try:
        die_with(job["parent"], signal.SIGTERM)
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or importing numpy starts threads, and forking would lose them
        import torch.distributed  # noqa: F401

        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise RuntimeError(f"{threads} threads after importing torch; ranks are forked from one")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        start(job, ranks)
        failures = wait(ranks)
    finally:
        for process in ranks:
            os.killpg(process, signal.SIGKILL)
        for process in ranks:
            reap(process)
    if not failures:
        return 0
    _, rank, status, words = failures[0]
    tell(rank, status, words)
    return status if status > 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
