"""How a rank that fails leaves: one line for people, everything else in a log."""

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

from torch.distributed import distributed_c10d

from .flags import Arguments

_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
_SECONDS_TO_BE_ENDED = 5


def crash_log(args: Arguments, error: BaseException) -> Path:
    """Write what this rank was doing to `--save`/crash/rank-N.log, and return its path.

    Without `--save`, or if it cannot be written to, the log is in a new folder for temporary files.

    Raises:
        OSError: it cannot be written there either.
    """
    if args.save:
        try:
            return _write(Path(args.save) / "crash", args.rank, error)
        except OSError:
            pass
    return _write(Path(tempfile.mkdtemp(prefix="crash-")), args.rank, error)


def _write(directory: Path, rank: int, error: BaseException) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank-{rank}.log"
    with path.open("w") as log:
        log.write(f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {time.strftime('%F %T')}\n\n")
        traceback.print_exception(error, file=log)
        log.write("\n")
        log.flush()
        faulthandler.dump_traceback(log, all_threads=True)
    return path


def leave_after(args: Arguments, error: BaseException) -> NoReturn:
    """End this process with status 1 because of `error`.

    Of the ranks that fail by themselves the first says why. One that only lost a peer says nothing.
    """
    try:
        details = f"details in {crash_log(args, error)}"
    except OSError as full:
        details = f"its details could not be written: {full}"
    if not lost_a_peer(error) and _is_first():
        print(f"rank {args.rank}: {one_line(error)}; {details}", file=sys.stderr, flush=True)
    else:
        # The launcher reports the rank that ended first, and ends the others.
        signal.sigtimedwait({signal.SIGTERM}, _SECONDS_TO_BE_ENDED)
    os._exit(1)


def lost_a_peer(error: BaseException) -> bool:
    """Whether `error` says only that another rank is gone."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:400].rstrip(": ")


def _is_first() -> bool:
    try:
        return distributed_c10d._get_default_store().add("ranks that told of an error", 1) == 1
    except (RuntimeError, ValueError):  # the store is gone, or was never there
        return True
