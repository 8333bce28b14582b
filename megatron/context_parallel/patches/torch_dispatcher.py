"""PyTorch's dispatcher: operators without autograd, and whether transforms are in progress.

No public name does either: under `torch.no_grad` an operator still passes through autograd's kernel.
"""

import torch

CHECKED = {"torch": "2.11 to 2.13"}

below_autograd = torch._C._AutoDispatchBelowAutograd  # a context: operators in it have no autograd
in_transform = torch._C._are_functorch_transforms_active  # whether this is inside grad, jvp, vmap of torch.func
