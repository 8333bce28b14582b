"""How a data worker ends when it cannot deliver a batch."""

import errno
import os
from collections.abc import Sequence

from megatron.context_parallel.patches.torch_data_workers import when_batch_is_lost

NO_ROOM = "unable to allocate shared memory"


def end_without_room(worker: int) -> None:
    """Make a data worker end when it cannot deliver a batch. Otherwise the rank would wait for the batch forever.

    Its exit status is the system's error number.
    """
    when_batch_is_lost(_end_worker)


def _end_worker(error: BaseException, batch: object) -> None:
    number = errno.ENOSPC if NO_ROOM in str(error) else 1
    os._exit(errno.EMFILE if is_limit_of_files([error]) else number)


def is_limit_of_files(chain: Sequence[BaseException]) -> bool:
    """Whether an error in a chain reports too many open files."""
    return any("too many open files" in str(error).lower() for error in chain)
