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
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent, by_main_thread = _forking
    if by_main_thread:  # the kernel counts the end of another thread as the parent's
        _die_with(parent)


def _die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def end_at_signals(
    rank: int, numbers: set[signal.Signals], tell: Callable[[str], None], last_words: Callable[[], str]
) -> None:
    """At SIGINT or SIGTERM end this process, also while it waits for other ranks.

    Call it in the main thread.

    Args:
        rank: this one.
        numbers: which of the two signals.
        tell: gets the name of the signal, before this process ends.
        last_words: what rank 0 prints at SIGINT. The status is then 130; at SIGTERM the signal ends the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in numbers:
        signal.signal(number, _ignore)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    arguments = reader, rank, numbers, tell, last_words
    threading.Thread(target=_end_at_signals, args=arguments, name="signals", daemon=True).start()


def _ignore(number: int, frame: object) -> None:
    """The main thread may be in a collective: the thread of the pipe acts."""


def _end_at_signals(
    pipe: int, rank: int, numbers: set[signal.Signals], tell: Callable[[str], None], last_words: Callable[[], str]
) -> None:
    while not (came := numbers.intersection(os.read(pipe, 64))):
        pass
    number = signal.Signals(min(came))
    try:
        tell(number.name)
        if number == signal.SIGTERM:
            _libc.signal(number, None)  # its default; Python sets it in the main thread only
            os.kill(os.getpid(), number)
        if rank == 0:
            print(last_words(), file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_TO_SPEAK)  # rank 0 would lose a peer
    finally:
        os._exit(128 + number)
