"""Worker processes of PyTorch's data loader: where they fail, nothing public is called.

A worker hands over a batch in a thread of its queue, which is Python's. That prints an error and goes on.
"""

from collections.abc import Callable
from multiprocessing.queues import Queue

from torch.utils.data import dataloader

CHECKED = {"torch": "2.11 to 2.13"}


def when_batch_is_lost(act: Callable[[BaseException, object], None]) -> None:
    """In a worker: `act` is called with the error and the batch where one cannot be handed over."""
    Queue._on_queue_feeder_error = staticmethod(act)  # type: ignore[attr-defined]


def forget_workers() -> None:
    """After a loader whose workers could not start: it has no mark of being shut down, and would ask when deleted."""
    dataloader._MultiProcessingDataLoaderIter._shutdown = True
