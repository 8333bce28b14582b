"""oneDNN's products with weights in a layout of its own. Only PyTorch's compiler uses them; no function is public."""

import torch
from torch import Tensor

CHECKED = {"torch": "2.11 to 2.15"}

ROWS = 8  # for which oneDNN chooses the layout; it serves other numbers of rows too


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch has these products, for such a weight."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and torch.backends.mkldnn.is_available()


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] times the transpose of a packed weight, plus the bias [out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
