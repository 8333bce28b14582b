"""flash-attn 4, in CuTe DSL."""

import importlib
import inspect
from collections.abc import Sequence

from .base import Capability, Library


class FlashAttention4(Library):
    """flash-attn 4 (CuTe DSL), compiled at first use. A beta, so it is used only where its authors offer it."""

    name, title, module = "flash4", "flash-attn 4", "flash_attn.cute.interface"
    distribution, oldest = "flash-attn-4", "4.0.0b36"

    @classmethod
    def missing(cls, head_dim: int) -> str | None:
        if why := super().missing(head_dim):
            return why
        # flash-attn 2.8 contains an early copy of the same files. The package installed last wins.
        backward = importlib.import_module(cls.module)._flash_attn_bwd
        if "deterministic" not in inspect.signature(backward).parameters:
            return "flash_attn.cute comes from flash-attn 2.8; install flash-attn-4 again"
        return None

    @classmethod
    def head_dims(cls, capability: Capability, *, deterministic: bool) -> Sequence[int]:
        # _validate_head_dims in cute/interface.py.
        return {9: range(8, 257, 8), 10: (*range(8, 129, 8), 256)}.get(capability[0], ())

    def _forward(self, q, k, v, causal, scale):
        return self.calls._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        return self.calls._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, causal=causal, deterministic=self.deterministic
        )[:3]
