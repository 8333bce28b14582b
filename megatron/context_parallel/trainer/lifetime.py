"""Who ends with whom: a rank with its launcher, the helpers of a rank with the rank, and all of them at Ctrl-C."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 128 + signal.SIGINT
_SECONDS_TO_SPEAK = 1
_libc = ctypes.CDLL(None)
_forking = (0, False)  # the process that forks, and whether its main thread does


def end_with_parent() -> None:
    """Let Linux kill this rank when its launcher ends, and what the rank forks when the rank ends.

    Only torchrun counts as a launcher: a rank that was started from a shell may outlive it. Ranks of srun are ended by
    Slurm. Forked helpers also ignore SIGINT. Call it in the main thread.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with(os.getppid())
    _watch_forks()


@cache
def _watch_forks() -> None:
    os.register_at_fork(before=_about_to_fork, after_in_child=_forked)


def _about_to_fork() -> None:
    global _forking
    _forking = (os.getpid(), threading.current_thread() is threading.main_thread())


def _forked() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, by_main_thread = _forking
    if by_main_thread:  # the kernel counts the end of another thread as the parent's
        _die_with(parent)


def _die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def end_at_interrupt(rank: int, last_words: Callable[[], str]) -> None:
    """At SIGINT end this process with status 130, also while it waits for other ranks; rank 0 prints `last_words()`.

    Call it in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(
        signal.SIGINT, lambda number, frame: None
    )  # the main thread may be in a collective: do not rely on it
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_at_interrupt, args=(reader, rank, last_words), name="interrupt", daemon=True).start()


def _end_at_interrupt(signals: int, rank: int, last_words: Callable[[], str]) -> None:
    while signal.SIGINT not in os.read(signals, 64):
        pass
    try:
        if rank == 0:
            print(last_words(), file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_TO_SPEAK)  # rank 0 would lose a peer
    finally:
        os._exit(_INTERRUPTED)
