"""Copies from the host to a device that the host does not wait for."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. A copy from the host to a GPU starts from pinned memory, so the host goes on at once."""
    if device.type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
