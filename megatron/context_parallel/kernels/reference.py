"""Exact attention by its definition, in float64: what every kernel and every strategy is compared with."""

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of whole sequences: q [s, b, heads, d], k and v [s, b, kv_heads, d], of any dtype.

    Returns the output [s, b, heads, d] and its log-sum-exp [s, b, heads], both float64. Differentiable.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhij,jbhd->ibhd", (scores - lse.unsqueeze(-1)).exp(), v)
    return out, lse.permute(2, 0, 1)


class Reference:
    """The block interface of `aten.AtenFlash` by definition, in float64 whatever comes in."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bgij,jbd->ibgd", (scores - lse.unsqueeze(-1)).exp(), v.double())
        return out, lse.permute(2, 0, 1)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self._scores(q, k, causal, scale)
        p = (scores - lse.double().permute(1, 2, 0).unsqueeze(-1)).exp()
        dv = torch.einsum("bgij,ibgd->jbd", p, dout.double())
        dp = torch.einsum("ibgd,jbd->bgij", dout.double(), v.double())
        ds = p * (dp - delta.double().permute(1, 2, 0).unsqueeze(-1)) * scale
        return (
            torch.einsum("bgij,jbd->ibgd", ds, k.double()),
            torch.einsum("bgij,ibgd->jbd", ds, q.double()),
            dv,
        )

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = torch.einsum("ibgd,jbd->bgij", q.double(), k.double()) * scale
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        return scores
