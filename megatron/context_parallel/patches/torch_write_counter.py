"""The number of writes to a tensor: autograd's version counter of its storage. There is no public name for it."""

from torch import Tensor

CHECKED = {"torch": "2.11 to 2.15"}


def writes_to(x: Tensor) -> int:
    """The number of writes to the storage of `x`; tensors of inference mode do not count them."""
    try:
        return x._version
    except RuntimeError:
        return 0
