"""The crash log of a failing rank."""

import faulthandler
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from tempfile import mkdtemp

from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.trainer.config.flags import Arguments

from .lifetime import sigterm_came

_SECONDS_TO_BE_ENDED = 5
_LOOK = 0.05  # seconds


def crash_log(args: Arguments, error: BaseException | str, rank: int | None = None) -> Path:
    """Write the state of this rank to `--save`/crash/rank-N.log, and return the path.

    Without `--save`, or if it is not writable, the log is in a new temporary folder.

    Args:
        args: the arguments of the run.
        error: the error of this rank, or why it is ended.
        rank: another rank, which cannot write; then only `error` is written.

    Raises:
        OSError: the temporary folder is not writable either.
    """
    if args.save:
        try:
            return _write(Path(args.save) / "crash", args.rank, error, rank)
        except OSError:
            pass
    return _write(Path(mkdtemp(prefix="crash-")), args.rank, error, rank)


def _write(directory: Path, me: int, error: BaseException | str, rank: int | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank-{me if rank is None else rank}.log"
    with path.open("w") as log:
        when = time.strftime("%F %T")
        if rank is not None:
            log.write(f"written by rank {me} on {socket.gethostname()}, {when}\n\n{error}\n")
            return path
        log.write(f"rank {me}, process {os.getpid()} on {socket.gethostname()}, {when}\n")
        log.write(f"at {recorder.position}\n")
        if on_gpu := recorder.awaited_by_gpu:
            log.write(f"its GPU at {on_gpu}\n")
        log.write("\n")
        if isinstance(error, str):
            log.write(f"{error}\n")
        else:
            traceback.print_exception(error, file=log)
        log.write("\nlast transport operations:\n")
        log.writelines(f"{line}\n" for line in recorder.operations() or ["none"])
        log.write("\nthreads:\n")
        log.flush()
        faulthandler.dump_traceback(log, all_threads=True)
    return path


def linger() -> None:
    """Give the launcher time to see which rank ended first: it reports that one, and ends the others."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end = time.monotonic() + _SECONDS_TO_BE_ENDED
    # It may have come before, or come to another thread.
    while not sigterm_came() and not signal.sigtimedwait({signal.SIGTERM}, _LOOK) and time.monotonic() < end:
        pass
