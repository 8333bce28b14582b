"""Block attention: the kernels, what they can do, and which one serves a tensor."""

from typing import Protocol

import torch
from torch import Tensor

from .aten import AtenFlash


class Kernel(Protocol):
    """Attention of one full or (square) causal block; see `aten.AtenFlash` for shapes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that serves tensors of this device and dtype.

    Raises:
        UsageError: no kernel for the dtype on that device.
    """
    return AtenFlash(device, dtype)
