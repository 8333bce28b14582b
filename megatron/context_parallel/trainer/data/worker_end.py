"""How a data worker ends: when it cannot deliver a batch, and when its rank ended."""

import errno
import os
import sys
from collections.abc import Sequence
from types import TracebackType

from megatron.context_parallel.patches.torch_data_workers import when_batch_is_lost

NO_ROOM = "unable to allocate shared memory"


def prepare_worker(worker: int) -> None:
    """Make a data worker end when it cannot deliver a batch. Otherwise the rank would wait for the batch forever.

    Its exit status is the system's error number. A worker whose rank ended first says nothing: the rank's error counts.
    """
    when_batch_is_lost(_end_worker)
    sys.excepthook = _print_unless_rank_ended


def _print_unless_rank_ended(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an error of the thread that hands batches over, except when the rank hung up."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)


def _end_worker(error: BaseException, batch: object) -> None:
    number = errno.ENOSPC if NO_ROOM in str(error) else 1
    os._exit(errno.EMFILE if is_limit_of_files([error]) else number)


def is_limit_of_files(chain: Sequence[BaseException]) -> bool:
    """Whether an error in a chain reports too many open files."""
    return any("too many open files" in str(error).lower() for error in chain)
