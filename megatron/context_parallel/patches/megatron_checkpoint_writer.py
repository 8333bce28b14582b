"""megatron-core's writer of checkpoints: its queue of results, and the steps in which rank 0 writes alone.

The writer takes no queue of ours, and no step tells the other ranks of an error.
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
    """Puts `wrap(step)` in the place of each step. Of its arguments the first may have the folder of the checkpoint as
    `checkpoint_dir`; otherwise the last is the folder, or the plan, which the step returns."""
    for owner, name in _STEPS_OF_RANK_0:
        setattr(owner, name, wrap(getattr(owner, name)))


def take_results_in_this_process() -> None:
    """For the next save: for a queue of its own the writer would start a process, which outlives a killed rank."""
    filesystem_async._results_queue = queue.Queue()
