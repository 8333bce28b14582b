"""Worker processes of PyTorch's data loader: there is no public hook for their failures.

A worker sends a batch in a thread of its Python queue. On an error, this thread prints it and continues.
"""

from collections.abc import Callable
from multiprocessing.queues import Queue

from torch.utils.data import dataloader

CHECKED = {"torch": "2.11 to 2.15"}


def when_batch_is_lost(act: Callable[[BaseException, object], None]) -> None:
    """In a worker: call `act` with the error and the batch if a batch cannot be sent."""
    Queue._on_queue_feeder_error = staticmethod(act)  # type: ignore[attr-defined]


def forget_workers() -> None:
    """Clean up a loader whose workers could not start: it lacks the attribute that its destructor reads."""
    dataloader._MultiProcessingDataLoaderIter._shutdown = True
