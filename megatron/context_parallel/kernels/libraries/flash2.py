"""flash-attn 2."""

from collections.abc import Sequence

import torch

from .aten import AtenFlashCuda
from .base import Capability, Library


class FlashAttention2(Library):
    name, title, module = "flash2", "flash-attn 2", "flash_attn.flash_attn_interface"
    distribution, oldest = "flash-attn", "2.7"

    @classmethod
    def head_dims(cls, capability: Capability, *, deterministic: bool) -> Sequence[int]:
        return AtenFlashCuda.head_dims(capability, deterministic=deterministic)

    def _arguments(self, causal: bool, scale: float) -> dict[str, object]:
        """The arguments by name that forward and backward share."""
        arguments: dict[str, object] = {"dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "softcap": 0.0}
        return arguments | {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}

    def _forward(self, q, k, v, causal, scale):
        return self.calls._flash_attn_forward(q, k, v, return_softmax=False, **self._arguments(causal, scale))[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        arguments = self._arguments(causal, scale) | {"deterministic": self.deterministic}
        self.calls._flash_attn_backward(dout, q, k, v, out, lse, *grads, **arguments)
        return grads
