"""Disk errors during a save: no space, read-only, removed. All ranks agree on the error, which is one line."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.context_parallel.patches.megatron_checkpoint_writer import wrap_steps_of_rank_0
from megatron.context_parallel.runtime.comm.first_rank import DiskError
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of

from .save_lock import check_save_lock

_ADVICE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space") | {errno.ENOENT: "restore it"}
_kept: list[Exception] = []


def begin_save(args: Arguments) -> None:
    """Check on rank 0, before anything is written, that the directory exists and has enough space.

    Raises:
        OSError: it does not exist, or has too little space.
    """
    assert args.save is not None
    _keep_errors()
    _kept.clear()
    check_save_lock()
    needed = checkpoint_bytes(args)
    disk = os.statvfs(args.save)
    free = disk.f_bavail * disk.f_frsize
    if free < needed:
        why = f"a checkpoint needs {_megabytes(needed)}, and {_megabytes(free)} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {why}", args.save)


def checkpoint_bytes(args: Arguments) -> int:
    """The minimum size of a checkpoint, in bytes: weights, two moments and, with 16-bit weights, a float32 copy."""
    weights = args.params_dtype.itemsize
    optimizer = 0 if args.no_save_optim else 12 if weights == 2 else 8
    return model_of(args).parameters * (weights + optimizer)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB ({count} bytes)"


# ------------------------------------------------------------------------------------------------------ errors


def raise_kept() -> None:
    """On rank 0, before a checkpoint is published, raise the first recorded error since `begin_save`."""
    if _kept:
        raise _kept[0]


@cache
def _keep_errors() -> None:
    # Only rank 0 writes these files. If it raised inside megatron-core, the other ranks would wait for it.
    wrap_steps_of_rank_0(_keeps_errors)


def _keeps_errors(step: Callable) -> Callable:
    @wraps(step)
    def run(*args: Any) -> Any:
        try:
            return step(*args)
        except (OSError, RuntimeError) as error:
            directory = getattr(args[0], "checkpoint_dir", args[-1])
            _kept.append(cause_of(error, Path(directory)))
            return args[-1]  # the plan, if the caller expects one

    return run


def cause_of(error: BaseException, directory: Path) -> Exception:
    """The OSError behind `error`, raised while writing into `directory`; `error` itself if none is."""
    behind: BaseException | None = error
    while behind:
        if isinstance(behind, OSError):
            return behind
        behind = behind.__cause__ or behind.__context__
    try:  # PyTorch's writer does not report it
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    except OSError as found:
        return OSError(found.errno, found.strerror, str(directory))
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def not_saved(args: Arguments, iteration: int, error: DiskError) -> str:
    """Remove the files of a failed save, on rank 0. Returns one line with the error and a remedy."""
    assert args.save is not None
    if dist.get_rank() == 0:
        for partial in Path(args.save).glob("iter_*.incomplete"):
            shutil.rmtree(partial, ignore_errors=True)
    where = f" ({error.filename})" if error.filename and str(error.filename) != args.save else ""
    advice = _ADVICE.get(error.errno or 0, "make it writable")
    return (
        f"--save {args.save}: iteration {iteration} was not saved: {error.strerror or error}{where}; {advice}, or give "
        "another --save"
    )
