"""Keeps a GPU busy for a number of its cycles. PyTorch's own tests use this function; it is not public."""

import torch

CHECKED = {"torch": "2.11 to 2.15"}


def sleep(cycles: int) -> None:
    """Queues a kernel that does nothing for so many cycles of the current GPU."""
    torch.cuda._sleep(cycles)
