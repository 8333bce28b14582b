"""A directory of checkpoints belongs to one job at a time."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.first_rank import on_first_rank
from megatron.context_parallel.trainer.config.flags import Arguments

_NAME = "lock"  # a file in --save that names the job that has locked it; it stays, unlocked, when the job ends
_SECONDS_FOR_REQUEUE = 120  # a network file system needs up to this long to drop the locks of a failed node
_held: tuple[int, Path] | None = None  # the open file, and where it was


@contextmanager
def save_lock(args: Arguments) -> Iterator[None]:
    """Prevent other jobs from saving to `--save` until the block ends. Every rank calls it.

    Rank 0 holds the lock. The system releases it with the process, so nothing is left to remove after a crash.

    Raises:
        UsageError: another job has the lock, or the directory is not writable; every rank raises the same.
    """
    global _held
    if not args.save:
        yield
        return
    on_first_rank(lambda: _hold(args))
    yield
    if _held:
        os.close(_held[0])
        _held = None


def _hold(args: Arguments) -> None:
    global _held
    try:
        assert args.save is not None
        _held = _lock(args, Path(args.save) / _NAME)
    except OSError as error:
        raise UsageError(
            f"--save {args.save}: not writable ({error.strerror}); give a writable directory, such as --save runs/first"
        ) from None


def check_save_lock() -> None:
    """On rank 0, whether the locked directory is still there.

    Raises:
        FileNotFoundError: it was removed, or its file system is no longer mounted.
    """
    if _held:
        file, path = _held
        if not (path.exists() and os.path.samestat(path.stat(), os.fstat(file))):
            raise FileNotFoundError(errno.ENOENT, "the directory was removed or unmounted", str(path.parent))


def _lock(args: Arguments, path: Path) -> tuple[int, Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    ours = f"Slurm job {os.environ['SLURM_JOB_ID']}," if "SLURM_JOB_ID" in os.environ else ""
    deadline = time.monotonic() + _SECONDS_FOR_REQUEUE
    while not _try_to_lock(args, file):
        owner = os.pread(file, 1000, 0).decode(errors="replace").strip()
        if not (ours and ours in owner) or time.monotonic() > deadline:
            raise UsageError(
                f"--save {args.save}: in use by another job ({owner}); wait until it ends, or give another --save"
            )
        time.sleep(1)  # the same job, requeued: its first run has ended
    os.ftruncate(file, 0)
    owner = f"{ours} process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n".lstrip()
    os.pwrite(file, owner.encode(), 0)
    return file, path


def _try_to_lock(args: Arguments, file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        print(
            f"warning: --save {args.save}: cannot be locked ({error.strerror}), so a second job would not be detected",
            flush=True,
        )
    return True
