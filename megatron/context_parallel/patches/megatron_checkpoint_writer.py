"""megatron-core's checkpoint writer: its queue of results, and the steps in which only rank 0 writes.

The writer does not accept another queue, and none of its steps reports an error to the other ranks.
"""

import queue
from collections.abc import Callable

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

CHECKED = {"megatron-core": "0.16"}

_STEPS_OF_RANK_0 = (
    (TorchCommonSaveStrategy, "save_common"),
    (FileSystemWriterAsync, "prepare_local_plan"),
    (FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)


def wrap_steps_of_rank_0(wrap: Callable[[Callable], Callable]) -> None:
    """Replaces each step with `wrap(step)`. The first argument of a step may have the checkpoint's folder as
    `checkpoint_dir`; otherwise the last argument is the folder, or the plan, which the step returns."""
    for owner, name in _STEPS_OF_RANK_0:
        setattr(owner, name, wrap(getattr(owner, name)))


def take_results_in_this_process() -> None:
    """Sets the queue of the next save. The writer's own queue would start a process that outlives a killed rank."""
    filesystem_async._results_queue = queue.Queue()
