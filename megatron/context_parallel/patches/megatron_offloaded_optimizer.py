"""Moments of 0 for megatron-core's optimizer in host memory, before its first step.

megatron-core has no function for it: it makes a step with random gradients, which changes the weights.
"""

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

CHECKED = {"megatron-core": "0.16 to 0.19"}


def prime_offloaded(adam: HybridDeviceOptimizer) -> None:
    """Give every parameter moments of 0, if there is no state yet."""
    if adam.state:
        return
    for inner in adam.sub_optimizers:
        for weight in (weight for group in inner.param_groups for weight in group["params"]):
            inner.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            if isinstance(inner, torch.optim.Adam):
                inner.state[weight]["step"] = torch.tensor(0.0)
    adam._sync_sub_optimizers_state_to_hdo()
