"""PyTorch's dispatcher: operators without autograd, and whether function transforms are active.

There is no public name for either: under `torch.no_grad` an operator still runs through autograd's kernel.
"""

import torch

CHECKED = {"torch": "2.11 to 2.15"}

below_autograd = torch._C._AutoDispatchBelowAutograd  # a context manager: operators in it bypass autograd
in_transform = torch._C._are_functorch_transforms_active  # whether grad, jvp or vmap of torch.func is active
