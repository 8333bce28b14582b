"""megatron-core's writer of checkpoints: its queue of results, and the steps in which rank 0 writes alone.

The writer takes no queue of ours, and no step tells the other ranks of an error.
"""

import queue
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

CHECKED = {"megatron-core": "0.16 to 0.19"}

# What all ranks share is in common.pt, which a class writes in 0.16, and a function in 0.17 and 0.18. Since 0.19 it is
# an object in the shards.
_COMMON: Any = getattr(common, "TorchCommonSaveStrategy", serialization)
HAS_COMMON_FILE = hasattr(_COMMON, "save_common")
_STEPS_OF_RANK_0: list[tuple[Any, str]] = [
    (FileSystemWriterAsync, "prepare_local_plan"),
    (FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
    *([(_COMMON, "save_common")] if HAS_COMMON_FILE else []),
]


def wrap_steps_of_rank_0(wrap: Callable[[Callable], Callable]) -> None:
    """Puts `wrap(step)` in the place of each step. Of its arguments the first may have the folder of the checkpoint as
    `checkpoint_dir`; otherwise the last is the folder, or the plan, which the step returns."""
    for owner, name in _STEPS_OF_RANK_0:
        setattr(owner, name, wrap(getattr(owner, name)))


def take_results_in_this_process() -> None:
    """For the next save: for a queue of its own the writer would start a process, which outlives a killed rank."""
    filesystem_async._results_queue = queue.Queue()
