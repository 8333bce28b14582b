"""Attention by its definition, whole and dense in float64: the oracle of tests. Nothing here uses the package."""

import torch
from torch import Tensor


def visible(
    queries: Tensor,
    keys: Tensor,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    documents: Tensor | None = None,
) -> Tensor:
    """Which keys each query sees: bool [samples, s, t]; one sample without documents.

    Args:
        queries, keys: their positions, [s] and [t].
        causal: whether a query sees no later key.
        window: how many keys it sees before and after itself; -1: all.
        documents: integers [length] or [samples, length]. Equal neighbours are one document; what is negative sees
            nothing and is not seen.
    """
    back = queries.unsqueeze(1) - keys
    before, after = window
    allowed = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    if before >= 0:
        allowed = allowed & (back <= before)
    if after >= 0:
        allowed = allowed & (-back <= after)
    if documents is None:
        return allowed.unsqueeze(0)
    ids = torch.atleast_2d(documents)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    numbers = starts.cumsum(1) * (ids >= 0)  # of documents, from 1; 0 is padding
    of_queries, of_keys = numbers[:, queries].unsqueeze(2), numbers[:, keys].unsqueeze(1)
    return allowed & (of_queries == of_keys) & (of_queries > 0)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [s, b, heads, dv] and log-sum-exp [s, b, heads], both float64 and differentiable.

    A query that sees nothing gets 0 and -inf, or its sink.

    Args:
        q: [s, b, heads, d], of any dtype.
        k, v: [t, b, kv_heads, d] and [t, b, kv_heads, dv].
        seen: bool [b or 1, s, t].
        scale: of the scores; default: d^-1/2.
        softcap: the limit that scores approach and do not reach; 0: none.
        sinks: a score of each head that takes weight and gives no value, [heads].
    """
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    q, k, v = q.unflatten(1, (kv_heads, group)), k.unsqueeze(2), v.unsqueeze(2)  # [b, kv_heads, group or 1, rows, d]
    scores = q @ k.transpose(3, 4) * (q.shape[4] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(seen[:, None, None], scores, -torch.inf)
    sink = scores.new_tensor([-torch.inf]) if sinks is None else sinks.double().view(kv_heads, group, 1, 1)
    largest = torch.maximum(scores.amax(4, keepdim=True), sink).detach()
    largest = torch.where(largest.isneginf(), 0.0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(4, keepdim=True) + torch.exp(sink - largest)
    out = weights / torch.where(total > 0, total, 1.0) @ v
    lse = (largest + total.log()).squeeze(4)
    return out.flatten(1, 2).permute(2, 0, 1, 3), lse.flatten(1, 2).permute(2, 0, 1)
