"""The all-gather of a process group, without the checks of `dist.all_gather_into_tensor`. They are slow."""

import torch.distributed as dist
from torch import Tensor

CHECKED = {"torch": "2.11 to 2.15"}


def all_gather(group: dist.ProcessGroup, everyone: Tensor, mine: Tensor) -> dist.Work:
    """Starts gathering `mine` [rows, ...] of all ranks into `everyone` [n * rows, ...]."""
    return group._allgather_base(everyone, mine)
