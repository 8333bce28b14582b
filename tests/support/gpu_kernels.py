"""What attention libraries of a GPU and our Triton kernels compute, by definition, from the arguments of real calls.

All tensors are on the host. The kernels themselves run in Triton's interpreter
(`tests/kernels/test_position_kernel.py`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.kernels.delta import output_with
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, PieceMask
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.kernels.paged import Seen
from megatron.context_parallel.kernels.quantized import unpack
from megatron.context_parallel.kernels.reference import Reference


def _attend(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """The scores [heads, s, t] of [1, s, heads, d]; the last rows see all keys."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("shd,thd->hst", q[0].float(), k[0].float().repeat_interleave(group, 1)) * scale
    return scores.masked_fill(~torch.ones_like(scores[0], dtype=torch.bool).tril(), -torch.inf) if causal else scores


def _flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, scale, *_):
    scores = _attend(q, k, causal, scale)
    values = v[0].float().repeat_interleave(q.shape[2] // k.shape[2], 1)
    out = torch.einsum("hst,thd->shd", scores.softmax(-1), values)[None]
    unused = torch.zeros(2, dtype=torch.uint64)
    return out.to(q.dtype), scores.logsumexp(-1)[None], unused, unused, unused


def _flash_backward(
    dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, scale, *_
):  # fmt: skip
    group = q.shape[2] // k.shape[2]
    p = (_attend(q, k, causal, scale) - lse[0].unsqueeze(-1)).exp()
    grads, values = dout[0].float(), v[0].float().repeat_interleave(group, 1)
    dp = torch.einsum("shd,thd->hst", grads, values)
    ds = p * (dp - (grads * out[0].float()).sum(-1).T.unsqueeze(-1)) * scale
    dq = torch.einsum("hst,thd->shd", ds, k[0].float().repeat_interleave(group, 1))
    dk, dv = (torch.einsum("hst,shd->thd", x, y) for x, y in ((ds, q[0].float()), (p, grads)))
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return tuple(x.to(q.dtype)[None] for x in (dq, dk, dv))


def _cudnn(q, k, v, bias, with_lse, dropout, causal, debug, scale):
    out, lse, *_ = _flash(*(x.transpose(1, 2) for x in (q, k, v)), None, None, 0, 0, 0.0, causal, False, scale)
    number = torch.zeros((), dtype=torch.int64)
    return out.transpose(1, 2), lse.unsqueeze(-1), None, None, 0, 0, number, number, None


def _cudnn_backward(dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, scale):
    rows_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = _flash_backward(*rows_first, lse.squeeze(-1), None, None, max_q, max_k, 0.0, causal, None, None, scale)
    return tuple(x.transpose(1, 2) for x in grads)


LIBRARIES = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}


def _mask(x: dict) -> PieceMask:
    return KeyRanges(x["first"], x["end"]) if x["MASK"] == "key_ranges" else x["MASK"]


def _forward(**x: Any) -> None:
    out, lse = Reference().forward(x["q"], x["k"], x["v"], _mask(x), Scores(x["scale"], x["SOFTCAP"]))
    x["out"].copy_(out)
    x["lse"].copy_(lse)


def _few_rows(**x: Any) -> None:
    for part, (out, lse) in enumerate(zip(x["out"], x["lse"], strict=True)):
        keys = slice(part * x["keys_a_part"], min((part + 1) * x["keys_a_part"], x["t"]))
        mask = _mask(x)
        if mask == CAUSAL:
            up = torch.arange(1, x["s"] + 1, dtype=torch.int32)[None]
            mask = KeyRanges(0 * up, up)
        mask = mask.of(slice(None), keys) if isinstance(mask, KeyRanges) else mask
        scores = Scores(x["scale"], x["SOFTCAP"])
        its_out, its_lse = Reference().forward(x["q"], x["k"][keys], x["v"][keys], mask, scores)
        out.copy_(its_out.transpose(0, 1).flatten(1, 2))
        lse.copy_(its_lse.transpose(0, 1).flatten(1, 2))


def _merge_parts(**x: Any) -> None:
    """The rows of a part are in one line: by head, row, and query head of a group."""
    lse_of_parts, out_of_parts = x["lse_of_parts"].flatten(1), x["out_of_parts"].flatten(1, -2)
    lse = lse_of_parts.logsumexp(0)
    weights = (lse_of_parts - lse.masked_fill(lse.isneginf(), 0.0)).exp().unsqueeze(-1)
    line = x["heads"], x["s"], x["group"]
    out = (weights * out_of_parts).sum(0).unflatten(0, line).transpose(0, 1)
    x["out"].copy_(out.reshape(x["out"].shape))
    x["lse"].copy_(lse.unflatten(0, line).transpose(0, 1).reshape(x["lse"].shape))


def _paged(**x: Any) -> None:
    """All keys of a row in the first part."""
    x["out"].zero_()
    x["lse"].fill_(-torch.inf)
    seen = Seen(x["table"], x["first"], x["end"], x["PAGE"])
    attend_to_pages(x["q"], x["k"], x["v"], seen, x["scale"], x["out"][0], x["lse"][0], x["FORM"])


def attend_to_pages(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, out: Tensor, lse: Tensor, form: str | None
) -> None:
    """As `PagedKernel.forward`, by definition."""
    if form:
        k, v = (unpack(x, form, q.dtype) for x in (k, v))
    for row, (first, end) in enumerate(zip(seen.first.tolist(), seen.end.tolist(), strict=True)):
        at = torch.arange(first, end)
        slots = seen.table[row].long()[at // seen.page] * seen.page + at % seen.page
        by_key = q[row].unflatten(0, (k.shape[1], -1)).unsqueeze(0)
        found, log = Reference().forward(by_key, k[slots], v[slots], FULL, Scores(scale))
        out[row].copy_(found.flatten(1, 2)[0])
        lse[row].copy_(log.flatten(1, 2)[0])


def _gradients(x: dict, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    q, dout = x["q"], x["dout"]
    k, v = (y.repeat_interleave(parts, 1) for y in (x["k"], x["v"]))
    lse, delta = (y.view(*q.shape[1:3], -1).permute(2, 0, 1) for y in (x["lse2"] * math.log(2), x["delta"]))
    return Reference().backward(BlockGrad(dout, q, k, v, lse, delta, _mask(x)), Scores(x["scale"], x["SOFTCAP"]))


def _query_grad(**x: Any) -> None:
    x["dq"].copy_(_gradients(x, 1)[0])


def _key_grad(**x: Any) -> None:
    dq, dk, dv = _gradients(x, x["parts"])
    x["dk"].copy_(dk)
    x["dv"].copy_(dv)
    if x["WITH_DQ"]:
        x["dq"].add_(dq)


def _by_head(**x: Any) -> None:
    x["lse2"].copy_(x["lse"].permute(1, 2, 0).flatten(0, 1) / math.log(2))
    x["delta_out"].copy_(x["delta"].permute(1, 2, 0).flatten(0, 1))


def _merge(**x: Any) -> None:
    merge(x["out"], x["lse"], x["other_out"], x["other_lse"])


def _output(**x: Any) -> None:
    x["out"].copy_(output_with(x["delta"], x["dout"]))


KERNELS = {
    "forward_kernel": _forward,
    "few_rows_kernel": _few_rows,
    "paged_kernel": _paged,
    "merge_parts_kernel": _merge_parts,
    "query_grad_kernel": _query_grad,
    "key_grad_kernel": _key_grad,
    "by_head_kernel": _by_head,
    "merge_kernel": _merge,
    "output_kernel": _output,
}

# The arguments that a kernel writes.
WRITTEN = {
    "forward_kernel": ("out", "lse"),
    "few_rows_kernel": ("out", "lse"),
    "paged_kernel": ("out", "lse"),
    "merge_parts_kernel": ("out", "lse"),
    "query_grad_kernel": ("dq",),
    "key_grad_kernel": ("dk", "dv", "dq"),
    "by_head_kernel": ("lse2", "delta_out"),
    "merge_kernel": ("out", "lse"),
    "output_kernel": ("out",),
}
