"""cuDNN, through PyTorch."""

import torch

from .base import Capability, Library

_aten = torch.ops.aten


class Cudnn(Library):
    """cuDNN's attention through ATen, which takes heads before rows, with any strides."""

    name, title = "cudnn", "cuDNN attention through PyTorch"

    def __init__(self) -> None:
        super().__init__()
        self.stats_dims = 3  # versions of PyTorch differ in the log-sum-exp: [1, heads, s] or [1, heads, s, 1]

    @classmethod
    def missing(cls) -> str | None:
        version = torch.backends.cudnn.version() or 0
        return (
            None if version >= 90000 else f"cuDNN is {version}, older than 9.0" if version else "PyTorch has no cuDNN"
        )

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        # check_cudnn_tensor_shapes in sdp_utils.cpp; cuDNN's own table allows no more in the backward pass.
        if capability < (8, 0):
            return 0
        return 256 if capability == (9, 0) and (torch.backends.cudnn.version() or 0) >= 91000 else 128

    def _forward(self, q, k, v, causal, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, stats = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        self.stats_dims = stats.dim()
        return out.transpose(1, 2), stats

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        stats = lse.unsqueeze(-1) if self.stats_dims == 4 else lse
        sizes = q.shape[1], k.shape[1]
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *(*heads_first, stats, unused, unused, None, None, None, *sizes, 0.0, causal), scale=scale
        )
        return tuple(grad.transpose(1, 2) for grad in grads)
