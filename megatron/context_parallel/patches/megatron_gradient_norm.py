"""The norm of all gradients in megatron-core without Transformer Engine and Apex.

Its own stand-in reads the norm of each weight's gradient on the host, which waits for the GPU once for each weight. It
has no option for it.
"""

from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from .torch_foreach import norm_of_each

CHECKED = {"megatron-core": "0.16 to 0.19"}


def norm_on_device() -> None:
    """Replaces megatron-core's stand-in, where it is used. May be called any number of times."""
    module: Any = clip_grads
    if module.l2_norm_impl is local_multi_tensor_l2_norm:
        module.l2_norm_impl = _norm


def _norm(chunk_size: int, noop: Tensor, tensor_lists: list[list[Tensor]], *_: object) -> tuple[Tensor, None]:
    """The norm of all tensors, float32 [1], as `multi_tensor_l2norm` of Transformer Engine.

    It is on the device of `noop`, from which it is summed over ranks: tensors may be in host memory.
    """
    norms = norm_of_each([tensor for tensors in tensor_lists for tensor in tensors], dtype=torch.float32)
    return torch.stack(norms).norm().view(1).to(noop.device), None
