"""The normalization layer used without Transformer Engine."""

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm, by `config.normalization`, with the constructor of megatron-core's norms.

    Unlike megatron-core's wrapper of PyTorch's norms it supports sequence parallelism: its parameters are marked, so
    that their gradients are summed over the tensor-parallel ranks. With `config.layernorm_zero_centered_gamma` 1 is
    added to the weight, in float32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        shape = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.eps = eps
        self.added = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 0.0 if self.added else 1.0, **shape))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **shape))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's mark

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of [..., hidden_size]. Returns the same shape and dtype."""
        if self.added:
            weight = 1 + self.weight.float()
            bias = None if self.bias is None else self.bias.float()
            return self._normalize(x.float(), weight, bias).to(x.dtype)
        return self._normalize(x, self.weight, self.bias)

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            # On CPU it is several operations. Their gradients are added here first, whatever is recomputed or kept.
            x = x.view_as(x)
            return torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps)
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, self.eps)
