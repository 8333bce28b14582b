"""Whether calls of a module do more than its class says: no public name tells of hooks on a module."""

import torch

CHECKED = {"torch": "2.11 to 2.15"}


def does_more(module: torch.nn.Module) -> bool:
    """Whether `module`, or one in it, has forward hooks, or a `forward` of its own instead of its class's."""
    return any(part._forward_pre_hooks or part._forward_hooks or "forward" in vars(part) for part in module.modules())
