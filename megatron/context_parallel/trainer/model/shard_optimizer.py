"""The optimizers of weights that FSDP2 shards: PyTorch's AdamW, and one for shards in host memory."""

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.context_parallel.patches.torch_foreach import norm_of_each, scale_each


def adamw_of_shards(like: MegatronOptimizer) -> torch.optim.AdamW:
    """PyTorch's AdamW with the weights, groups and settings of megatron-core's optimizer.

    Transformer Engine's Adam makes moments of whole weights until 2.13, and Apex's kernels take no DTensors.
    """
    config, given = like.config, like.optimizer
    groups = []
    for group in given.param_groups:
        own = dict(group)
        for name in given.defaults:
            own.pop(name, None)
        groups.append(own)
    how = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "fused": True}
    return torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, **how)


class HostOptimizer(FP32Optimizer):
    """Updates rows of weights on the host, which are DTensors. Only the sum of squares of gradients goes to the device.

    megatron-core's norm and clipping of gradients take tensors of a GPU only.
    """

    @torch.no_grad()
    def step(self) -> tuple[bool, float, None]:
        """Clips the gradients and updates the weights. Returns (True, gradient norm of all ranks, None)."""
        norm = self.get_grad_norm()
        scale = self.config.clip_grad / (norm + 1e-6)  # as megatron-core
        if scale < 1:
            scale_each(self._gradients(), scale)
        self.optimizer.step()
        return True, norm, None

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """The norm of the gradients of all ranks that share the weights."""
        shares = self._gradients()
        squares = torch.stack(norm_of_each(shares)).double().square().sum().to(torch.cuda.current_device())
        dist.all_reduce(squares, group=self._mesh_group())
        return float(squares) ** 0.5

    def _gradients(self) -> list[Tensor]:
        """This rank's rows of each gradient."""
        return [parameter.grad.to_local() for parameter in self.get_parameters() if parameter.grad is not None]

    def _mesh_group(self) -> dist.ProcessGroup:
        weight = self.get_parameters()[0]
        assert isinstance(weight, DTensor)
        return weight.device_mesh.get_group()
