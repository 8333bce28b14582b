"""What a thread waits for, read from the local variables of PyTorch's and megatron-core's functions that it is in.

Neither tells which collective or message is under way.
"""

import traceback
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

CHECKED = {"torch": "2.13", "megatron-core": "0.16 to 0.19"}


def awaited_by(innermost: FrameType) -> tuple[str, str, tuple[int, ...]] | None:
    """The collective, or the message of a pipeline, that a thread is in: its kind, its channel, and the other ranks."""
    for frame, _ in traceback.walk_stack(innermost):
        name, file, here = frame.f_code.co_name, frame.f_code.co_filename, frame.f_locals
        if file.endswith("distributed_c10d.py") and "group" in here:
            kind = "reduction" if name == "_coalescing_manager" else name
            return kind, "", _others(here["group"])
        if name == "finish_grad_sync" and hasattr(here.get("self"), "data_parallel_group"):
            return "reduction", "", _others(here["self"].data_parallel_group)
        if name == "_communicate" and file.endswith("p2p_communication.py"):
            to = {here["prev_rank"]: here["recv_prev"], here["next_rank"]: here["recv_next"]}
            received = tuple(rank for rank, wanted in to.items() if wanted)
            return ("receive", "pipeline", received) if received else ("send", "pipeline", tuple(to))
    return None


def _others(group: "dist.ProcessGroup | None") -> tuple[int, ...]:
    import torch.distributed as dist  # cp-stuck, which only reads what ranks found, does without

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return tuple(rank for rank in ranks if rank != dist.get_rank())
