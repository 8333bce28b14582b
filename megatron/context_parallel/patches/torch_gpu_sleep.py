"""Keeps a GPU busy for a number of its cycles. PyTorch's own tests use this function; it is not public."""

import torch

CHECKED = {"torch": "2.11 to 2.15"}


CYCLES = 4_000_000  # about 2 ms


def let_host_ahead() -> None:
    """Occupies the current GPU for about 2 ms, in which the host queues what follows.

    Otherwise a short kernel takes as long as its launch.
    """
    torch.cuda._sleep(CYCLES)
