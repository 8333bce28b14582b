"""PyTorch's own flash attention (ATen) for CPUs."""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.torch_cpu_attention import cpu_attention, cpu_attention_backward

from .delta import output_with
from .interface import BlockGrad, Scores
from .masks import CAUSAL, FULL, KeyRanges, Piece, PieceMask, cut, tiles
from .merge import merge

LEAF = 128  # rows of the smallest causal squares, unless the block has at most 16
TILE = 256  # query rows computed at a time for irregular masks on CPU


def _heads_first(x: Tensor) -> Tensor:
    """A view of [s, B, G, d] as [B, G, s, d], the kernels' order."""
    return x.permute(1, 2, 0, 3)


def _shared(x: Tensor, group: int) -> Tensor:
    """Keys or values [s, B, d] as [B, group, s, d]: all queries of a group read the same head, without a copy."""
    return x.unsqueeze(2).expand(-1, -1, group, -1).permute(1, 2, 0, 3)


def _rows_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3) if x.dim() == 4 else x.permute(2, 0, 1)


class AtenFlash:
    """`kernels.Kernel` on CPU.

    16-bit inputs are computed in float32. ATen would round gradients in each block, and their sum over blocks would
    have a larger error than a single process; its 16-bit forward pass is no faster. ATen supports one head_dim for
    queries, keys and values: the smaller is padded with zeros, which change no score and no output.

    Raises:
        UsageError: the scores have a softcap; use `softcap.SoftcapCpu`.
    """

    name = "aten"

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        return cut(block)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        group = q.shape[2]
        scale = _uncapped(scores)
        value_dim = v.shape[-1]
        q, k, v = _as_aten_takes(q, k, v)
        if mask == FULL and len(q) == 1:  # as in decoding: heads of a group become rows, to read their keys once
            k, v = k.transpose(0, 1).unsqueeze(1), v.transpose(0, 1).unsqueeze(1)
            out, lse = cpu_attention(q.transpose(0, 1), k, v, 0.0, False, scale=scale)
            return out.transpose(0, 1)[..., :value_dim], lse.transpose(0, 1)
        q, k, v = _heads_first(q), _shared(k, group), _shared(v, group)
        if isinstance(mask, KeyRanges):
            out, lse = _forward_key_ranges(q, k, v, mask, scale)
        elif mask == CAUSAL:
            out, lse = _forward_causal(q, k, v, scale)
        else:
            out, lse = cpu_attention(q, k, v, 0.0, False, scale=scale)
        return _rows_first(out)[..., :value_dim], _rows_first(lse)

    def forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """One query against each of several parts of keys alone, in one call.

        Args:
            q: [B, G, d]; k: [parts, B, rows, d]; v: [parts, B, rows, dv], which may be views.

        Returns:
            The outputs [parts, B, G, dv] in q's dtype or wider, and their log-sum-exp [parts, B, G].
        """
        scale = _uncapped(scores)
        value_dim = v.shape[-1]
        q, k, v = _as_aten_takes(q, k, v)
        parts = k.shape[0]
        q = q.unsqueeze(0) if parts == 1 else q.expand(parts, -1, -1, -1)
        out, lse = cpu_attention(q, k, v, 0.0, False, scale=scale)
        return out if out.shape[-1] == value_dim else out[..., :value_dim], lse

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, lse, delta, mask = grad
        group = q.shape[2]
        scale = _uncapped(scores)
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        dout, q, k, v = _same_width(*_widen(dout, q, k, v))
        out = _heads_first(output_with(delta, dout))
        inputs = (_heads_first(dout), _heads_first(q), _shared(k, group), _shared(v, group), out, lse.permute(1, 2, 0))
        if isinstance(mask, KeyRanges):
            grads = _backward_key_ranges(*inputs, mask, scale)
        elif mask == CAUSAL:
            grads = _backward_causal(*inputs, scale)
        else:
            grads = cpu_attention_backward(*inputs, 0.0, False, scale=scale)
        sizes = (head_dim, head_dim, value_dim)
        dq, dk, dv = (_rows_first(g)[..., :size] for g, size in zip(grads, sizes, strict=True))
        if group > 1:
            return dq, dk.sum(2), dv.sum(2)
        return dq, dk.squeeze(2), dv.squeeze(2)


def _as_aten_takes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """In float32 or wider, and with one head_dim."""
    if q.dtype == k.dtype == torch.float32 and q.shape[-1] == v.shape[-1]:
        return q, k, v
    return _same_width(*_widen(q, k, v))


def _widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    if {x.dtype for x in tensors} <= {torch.float32, torch.float64}:
        return tensors
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def _same_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, padded with zeros to the largest head_dim among them."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


def _uncapped(scores: Scores) -> float:
    """The softmax scale of scores without a softcap."""
    if scores.softcap:
        raise UsageError(
            f"softcap {scores.softcap}: PyTorch's flash attention for CPUs has no softcap; give 0, or use SoftcapCpu"
        )
    return scores.scale


def _halves(start: int, stop: int, leaf: int) -> Iterator[tuple[slice, slice]]:
    """(rows, keys) of the full rectangles below a causal square's diagonal, down to squares of `leaf` rows."""
    if stop - start > leaf:
        middle = (start + stop) // 2
        yield slice(middle, stop), slice(start, middle)
        yield from _halves(start, middle, leaf)
        yield from _halves(middle, stop, leaf)


def _causal_parts(count: int) -> tuple[list[slice], list[tuple[slice, slice]]]:
    """A causal square, split into small squares along its diagonal and the rectangles between them and its corner.

    ATen alone would compute each group of 512 keys completely if a query sees one of them.
    """
    rectangles = [*_halves(0, count, max(LEAF, count // 16))]
    edges = sorted({0, count, *(rows.start for rows, _ in rectangles)})
    return [slice(a, b) for a, b in pairwise(edges)], rectangles


def _forward_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    squares, rectangles = _causal_parts(q.shape[2])
    if not rectangles:
        return cpu_attention(q, k, v, 0.0, True, scale=scale)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float64)
    for rows in squares:
        own = (x[:, :, rows] for x in (q, k, v))
        out[:, :, rows], lse[:, :, rows] = cpu_attention(*own, 0.0, True, scale=scale)
    for rows, keys in rectangles:
        part = cpu_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, False, scale=scale)
        merge(out[:, :, rows], lse[:, :, rows], *part)
    return out, lse


def _backward_causal(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    squares, rectangles = _causal_parts(q.shape[2])
    if not rectangles:
        return cpu_attention_backward(dout, q, k, v, out, lse, 0.0, True, scale=scale)
    dq, dk, dv = torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)

    def of_piece(rows: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        inputs = dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows]
        return cpu_attention_backward(*inputs, 0.0, causal, scale=scale)

    for rows in squares:  # they cover all rows
        parts = of_piece(rows, rows, causal=True)
        dq[:, :, rows], dk[:, :, rows], dv[:, :, rows] = parts
    for rows, keys in rectangles:
        parts = of_piece(rows, keys, causal=False)
        for total, part in zip((dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]), parts, strict=True):
            total.add_(part)
    return dq, dk, dv


def _added(seen: Tensor, like: Tensor) -> Tensor:
    """The additive mask for the scores of a tile."""
    return torch.where(seen, 0.0, float("-inf")).to(like.dtype)


def _used(rows: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Tensors [B, G, rows, d] with zeros outside of some rows: a weight of 0 does not remove NaN or infinity."""
    return [*tensors] if rows.all() else [x.masked_fill(~rows.unsqueeze(1), 0.0) for x in tensors]


def _forward_key_ranges(q: Tensor, k: Tensor, v: Tensor, mask: KeyRanges, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for heads, rows, keys, seen in tiles(mask, len(q), TILE):
        inputs = q[heads, :, rows], *_used(seen.any(0), k[heads, :, keys], v[heads, :, keys]), 0.0, False
        out[heads, :, rows], lse[heads, :, rows] = cpu_attention(*inputs, attn_mask=_added(seen, q), scale=scale)
        blind = slice(None), slice(None), ~seen.any(1)
        out[heads, :, rows][blind], lse[heads, :, rows][blind] = 0.0, float("-inf")  # ATen returns 0 for both
    return out, lse


def _backward_key_ranges(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyRanges, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    lse = lse.masked_fill(lse.isneginf(), 0.0)  # rows that see nothing at all
    for heads, rows, keys, seen in tiles(mask, len(q), TILE):
        queries, columns = (heads, slice(None), rows), (heads, slice(None), keys)
        tile_dout, tile_q, tile_out = _used(seen.any(1), dout[queries], q[queries], out[queries])
        tile_k, tile_v = _used(seen.any(0), k[columns], v[columns])
        grads = cpu_attention_backward(
            *(tile_dout, tile_q, tile_k, tile_v, tile_out, lse[queries], 0.0, False),
            attn_mask=_added(seen, q),
            scale=scale,
        )
        for into, grad in zip((dq[queries], dk[columns], dv[columns]), grads, strict=True):
            into.add_(grad)
    return dq, dk, dv
