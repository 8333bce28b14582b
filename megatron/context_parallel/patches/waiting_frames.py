"""What a thread waits for, from the local variables of the PyTorch and megatron-core functions on its stack.

Neither library reports which collective or message is in flight.
"""

import traceback
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

CHECKED = {"torch": "2.11 to 2.15", "megatron-core": "0.16 to 0.19"}


def awaited_by(innermost: FrameType) -> tuple[str, str, tuple[int, ...]] | None:
    """The collective or pipeline message that a thread waits in: its kind, its channel, and the other ranks."""
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
    import torch.distributed as dist  # not needed by cp-stuck, which only reads files

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return tuple(rank for rank in ranks if rank != dist.get_rank())
