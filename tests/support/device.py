"""The device on which cases of tests compute: the GPU of this process, mostly a pretended one, or the CPU."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Given = TypeVar("Given")


def head_dim(small: int) -> int:
    """Of a small model. Kernels of a GPU have none below 64."""
    return 64 if DEVICE == "cuda" else small


HEAD_DIM = head_dim(8)
NO_POWER_OF_2 = 80 if DEVICE == "cuda" else 12
HEAD_DIMS = (HEAD_DIM, NO_POWER_OF_2, 128) if DEVICE == "cuda" else (4, HEAD_DIM, NO_POWER_OF_2, 16)


def on_device(given: Given) -> Given:
    """A module, or all tensors of what is given, on the device."""
    if isinstance(given, nn.Module):
        return given.to(DEVICE)
    return tree_map_only(Tensor, lambda x: x.to(DEVICE), given)
