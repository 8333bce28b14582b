"""The normalization layer used without Transformer Engine."""

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm, by `config.normalization`, with the constructor of megatron-core's norms.

    Unlike megatron-core's wrapper of PyTorch's norms it supports sequence parallelism: its parameters are marked, so
    that their gradients are summed over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        shape = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **shape))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **shape))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's mark

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of [..., hidden_size]. Returns the same shape and dtype."""
        if self.bias is None:
            # On CPU it is several operations. Their gradients are added here first, whatever is recomputed or kept.
            x = x.view_as(x)
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
