"""flash-attn 4, in CuTe DSL."""

from .base import Capability, Library, deterministic


class FlashAttention4(Library):
    """flash-attn 4 (CuTe DSL), compiled at first use; a beta, so only where its authors and PyTorch offer it."""

    name, title, module = "flash4", "flash-attn 4", "flash_attn.cute.interface"

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        return {9: 256, 10: 128}.get(capability[0], 0)  # _validate_head_dims

    def _forward(self, q, k, v, causal, scale):
        return self.calls._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        return self.calls._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, causal=causal, deterministic=deterministic()
        )[:3]
