"""How often a tensor was written to: autograd's counter of a tensor's storage. No public name tells it."""

from torch import Tensor

CHECKED = {"torch": "2.11 to 2.13"}


def writes_to(x: Tensor) -> int:
    """How often `x`, or what shares its storage, was written to; tensors of inference mode do not count."""
    try:
        return x._version
    except RuntimeError:
        return 0
