"""PyTorch's own flash attention for CUDA."""

from collections.abc import Sequence

import torch

from .base import Capability, Library

_aten = torch.ops.aten


class AtenFlashCuda(Library):
    """ATen's copy of flash-attn 2, present in every CUDA build of PyTorch.

    It checks PyTorch's deterministic mode itself: with `warn_only=True` it warns and is not deterministic.
    """

    name, title = "aten", "PyTorch's flash attention"
    strict_only = True

    @classmethod
    def missing(cls, head_dim: int) -> str | None:
        return None if torch.backends.cuda.is_flash_attention_available() else "this PyTorch has no flash attention"

    @classmethod
    def head_dims(cls, capability: Capability, *, deterministic: bool) -> Sequence[int]:
        # Backward of more than 192 needs the shared memory of data-center GPUs (sdp_utils.cpp).
        small = (8, 0) < capability < (9, 0) or capability[0] == 12
        return range(8, (0 if capability < (8, 0) else 192 if small else 256) + 1, 8)

    def _forward(self, q, k, v, causal, scale):
        sizes = q.shape[1], k.shape[1]
        return _aten._flash_attention_forward(q, k, v, None, None, *sizes, 0.0, causal, False, scale=scale)[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout's random numbers
        sizes = q.shape[1], k.shape[1]
        return _aten._flash_attention_backward(
            *(dout, q, k, v, out, lse, None, None, *sizes, 0.0, causal, unused, unused), scale=scale
        )
