"""Transformer Engine's fused attention."""

import torch
from torch import Tensor

from .base import Capability, Library, deterministic
from .cudnn import Cudnn


class TransformerEngine(Library):
    """Transformer Engine's fused attention: cuDNN's, in a layout given by name, so strided tensors are copied."""

    name, title = "te", "Transformer Engine's fused attention"
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    distribution, oldest = "transformer-engine", (2, 20)
    _LAYOUT = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd"}

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        return Cudnn.largest_head(capability)

    def _how(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[list, dict]:
        """The first arguments, and those by name, that forward and backward share."""
        rows = [q.shape[1], k.shape[1]]
        ends = [torch.arange(0, count + 1, count, dtype=torch.int32, device=q.device) for count in rows]
        mask = {"attn_mask_type": "causal" if causal else "no_mask", "window_size": (-1, 0 if causal else -1)}
        engine = {"fused_attention_backend": self.calls.FusedAttnBackend["F16_arbitrary_seqlen"]}
        how = {"attn_scale": scale, "dropout": 0.0, "attn_bias_type": "no_bias", "fake_dtype": q.dtype}
        return rows + ends, self._LAYOUT | mask | engine | how

    def _forward(self, q, k, v, causal, scale):
        q, k, v = (x.contiguous() for x in (q, k, v))
        first, how = self._how(q, k, causal, scale)
        out, (stats, *_) = self.calls.fused_attn_fwd(True, *first, q, k, v, **how)[:2]
        return out, stats

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        dout, q, k, v, out = (x.contiguous() for x in (dout, q, k, v, out))
        first, how = self._how(q, k, causal, scale)
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
        how |= {"do_format": "bshd", "dqkv_layout": "bshd_bshd_bshd", "deterministic": deterministic()}
        how["aux_ctx_tensors"] = [lse.unsqueeze(-1), no_dropout]
        return tuple(self.calls.fused_attn_bwd(*first, q, k, v, out, dout, **how)[:3])
