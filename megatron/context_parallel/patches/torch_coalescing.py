"""Several operations of a process group as one. Only `dist.batch_isend_irecv` is public: messages only, and slower."""

import torch
import torch.distributed as dist

CHECKED = {"torch": "2.11 to 2.15"}

as_one = dist._coalescing_manager  # a context manager; with async_ops=True its value has `wait`


def can_coalesce(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of `group` supports several messages as one operation: NCCL does, gloo does not."""
    return group._get_backend(device).supports_coalescing
