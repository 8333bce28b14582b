"""flash-attn 2."""

import torch

from .aten import AtenFlashCuda
from .library import Capability, Library, deterministic


class FlashAttention2(Library):
    name, title, module = "flash2", "flash-attn 2", "flash_attn.flash_attn_interface"
    distribution, oldest = "flash-attn", (2, 7)

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        return AtenFlashCuda.largest_head(capability)

    def _forward(self, q, k, v, causal, scale):
        return self.calls._flash_attn_forward(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.calls._flash_attn_backward(
            *(dout, q, k, v, out, lse, *grads),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=deterministic(),
        )
        return grads
