"""The normalization layer used where Transformer Engine's is not there."""

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm by `config.normalization`, built as megatron-core builds its norms.

    Unlike megatron-core's wrapper of PyTorch's norms it takes part in sequence parallelism: its parameters carry
    the mark by which their gradients are summed over the tensor-parallel ranks.
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
        """Normalize the last dimension of [..., hidden_size]; same shape and dtype."""
        if self.bias is None:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
