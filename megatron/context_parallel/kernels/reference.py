"""Exact attention by its definition, in float64: the reference for every kernel and strategy."""

import torch
from torch import Tensor

from .interface import BlockGrad, Scores
from .masks import CAUSAL, FULL, KeyRanges, Piece, PieceMask, cut


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float = 0.0,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of whole sequences: q [s, b, heads, d], k [s, b, kv_heads, d], v [s, b, kv_heads, dv], of any dtype.

    `scale` and `softcap` as in `kernels.Scores`.

    `seen`, bool [b or 1, s, s], restricts the keys of a query, besides `causal`. A query without keys gets 0 and -inf.

    Returns the output [s, b, heads, dv] and its log-sum-exp [s, b, heads], both float64. Differentiable.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores, _ = _capped(torch.einsum("ibhd,jbhd->bhij", q, k) * scale, softcap)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    allowed = allowed.tril() if causal else allowed
    allowed = allowed.expand(1, 1, -1, -1) if seen is None else allowed & seen.unsqueeze(1)
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    out = torch.einsum("bhij,jbhd->ibhd", weights, v)
    return out, lse.permute(2, 0, 1)


def _capped(scores: Tensor, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Capped scores and their derivative by the scores; with softcap 0, the scores and 1."""
    if not softcap:
        return scores, 1.0
    tanh = (scores / softcap).tanh()
    return softcap * tanh, 1 - tanh**2


class Reference:
    """`kernels.Kernel` by definition, always in float64."""

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        return cut(block)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        s, _ = self._scores(q, k, mask, scores)
        lse = s.logsumexp(-1)
        out = torch.einsum("bgij,jbd->ibgd", self._weights(s, lse), v.double())
        return out, lse.permute(2, 0, 1)

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, lse, delta, mask = grad
        s, slope = self._scores(q, k, mask, scores)
        p = self._weights(s, lse.double().permute(1, 2, 0))
        dv = torch.einsum("bgij,ibgd->jbd", p, dout.double())
        dp = torch.einsum("ibgd,jbd->bgij", dout.double(), v.double())
        ds = p * (dp - delta.double().permute(1, 2, 0).unsqueeze(-1)) * slope * scores.scale
        return (
            torch.einsum("bgij,jbd->ibgd", ds, k.double()),
            torch.einsum("bgij,ibgd->jbd", ds, q.double()),
            dv,
        )

    def _scores(self, q: Tensor, k: Tensor, mask: PieceMask, how: Scores) -> tuple[Tensor, Tensor | float]:
        """Scores [B, G, s, t], -inf for keys that are not seen, and the slope of their cap."""
        scores, slope = _capped(torch.einsum("ibgd,jbd->bgij", q.double(), k.double()) * how.scale, how.softcap)
        if mask == FULL:
            return scores, slope
        if mask == CAUSAL:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        else:
            assert isinstance(mask, KeyRanges)
            keys = torch.arange(len(k), device=q.device)
            seen = (keys >= mask.first.unsqueeze(2)) & (keys < mask.end.unsqueeze(2))
            seen = seen.repeat_interleave(len(scores) // len(seen), 0).unsqueeze(1)
        return scores.masked_fill(~seen, float("-inf")), slope

    def _weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        return (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
