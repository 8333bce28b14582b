"""Ends processes together: a rank with its launcher, helpers with their rank, and all of them at Ctrl-C."""

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
_forking = (0, False)  # the process that forks, and whether its main thread is the one that forks


def end_with_parent() -> None:
    """Make Linux kill this rank when its launcher ends, and the rank's forked helpers when the rank ends.

    Only torchrun counts as a launcher: a rank started from a shell may outlive the shell. Slurm ends ranks that srun
    started. Forked helpers also ignore SIGINT. Call it in the main thread.
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
    if by_main_thread:  # for the kernel, the parent ends with the thread that forked
        _die_with(parent)


def _die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os.kill(os.getpid(), signal.SIGKILL)


def end_at_signals(
    rank: int, numbers: set[signal.Signals], tell: Callable[[str], None], last_words: Callable[[], str]
) -> None:
    """End this process at SIGINT or SIGTERM, even while it waits for other ranks.

    Call it in the main thread.

    Args:
        rank: this rank.
        numbers: the signals to handle.
        tell: called with the name of the signal before this process ends.
        last_words: printed by rank 0 at SIGINT. The status is then 130; at SIGTERM the signal ends the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in numbers:
        signal.signal(number, _ignore)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    errors = os.dup(2)  # standard error may be redirected for a while (`open_store`)
    arguments = reader, errors, rank, numbers, tell, last_words
    threading.Thread(target=_end_at_signals, args=arguments, name="signals", daemon=True).start()


_sigterm: list[int] = []


def hold_back_sigterm() -> None:
    """Make SIGTERM only a wish to end, which `sigterm_came` tells. Call it in the main thread."""
    # Launchers also send it to a rank's helpers (data loaders, checkpoint writers), which must outlive the last save:
    # they inherit the mask. The handler is for threads without the mask: those of libraries that were started before,
    # and this one after `multiprocessing` has started a helper by "spawn", which lifts the mask.
    signal.signal(signal.SIGTERM, lambda number, frame: _sigterm.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def sigterm_came() -> bool:
    """Whether SIGTERM was received since it is held back."""
    return bool(_sigterm) or signal.SIGTERM in signal.sigpending()


def _ignore(number: int, frame: object) -> None:
    """Handles signals in a separate thread, because the main thread may be in a collective."""


def _end_at_signals(
    pipe: int,
    errors: int,
    rank: int,
    numbers: set[signal.Signals],
    tell: Callable[[str], None],
    last_words: Callable[[], str],
) -> None:
    while not (came := numbers.intersection(os.read(pipe, 64))):
        pass
    number = signal.Signals(min(came))
    try:
        tell(number.name)
        if number == signal.SIGTERM:
            _libc.signal(number, None)  # the default action; Python can set it only in the main thread
            os.kill(os.getpid(), number)
        if rank == 0:
            os.write(errors, f"{last_words()}\n".encode())
        else:
            time.sleep(_SECONDS_TO_SPEAK)  # so that rank 0 does not lose a peer before it prints
    finally:
        os._exit(128 + number)
