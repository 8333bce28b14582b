"""megatron-core's checkpoint writer: its queue of results, and the steps in which only rank 0 writes.

The writer does not accept another queue, and none of its steps reports an error to the other ranks.
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
    """Replaces each step with `wrap(step)`. The first argument of a step may have the checkpoint's folder as
    `checkpoint_dir`; otherwise the last argument is the folder, or the plan, which the step returns."""
    for owner, name in _STEPS_OF_RANK_0:
        setattr(owner, name, wrap(getattr(owner, name)))


def take_results_in_this_process() -> None:
    """Sets the queue of the next save. The writer's own queue would start a process that outlives a killed rank."""
    filesystem_async._results_queue = queue.Queue()
