"""Attention with capped scores on a CPU, in plain PyTorch: ATen's flash attention there has no softcap."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError
from . import BlockGrad, Scores
from .masks import CAUSAL, Mask, Piece, Runs

ROWS = 256  # most query rows of a tile
SCORES = 2**20  # most scores of a tile of more than one row, of all heads: bounds memory, and stays in the cache


class _Tile(NamedTuple):
    """Where a tile's queries and keys are (rows, heads), and its scores and their slope, [B, G, rows, keys] each.

    Scores are -inf where nothing is seen. The slope is the derivative of the capped scores by the scaled ones.
    """

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    scores: Tensor
    slope: Tensor


class SoftcapCpu:
    """`kernels.Kernel` on CPU for scores with a softcap; in float32 (float64 for float64) whatever comes in."""

    name = "softcap"

    def pieces(self, block: Runs, keys: int) -> list[Piece]:
        """The whole block in one piece: its tiles leave out what no query of theirs sees."""
        return [Piece(slice(0, block.first.shape[1]), slice(0, keys), block)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        for tile in _tiles(q, k, mask, scores, wide):
            stats = tile.scores.logsumexp(-1)
            out[tile.queries] = torch.einsum("bgij,jbd->ibgd", _weights(tile.scores, stats), v[tile.keys].to(wide))
            lse[tile.queries] = stats.permute(2, 0, 1)
        return out, lse

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, lse, delta, mask = grad
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for tile in _tiles(q, k, mask, scores, wide):
            queries, keys, of_out, values = (
                x[at].to(wide) for x, at in ((q, tile.queries), (k, tile.keys), (dout, tile.queries), (v, tile.keys))
            )
            p = _weights(tile.scores, lse[tile.queries].permute(1, 2, 0))
            dv[tile.keys] += torch.einsum("bgij,ibgd->jbd", p, of_out)
            ds = torch.einsum("ibgd,jbd->bgij", of_out, values)
            ds.sub_(delta[tile.queries].permute(1, 2, 0).unsqueeze(-1)).mul_(p).mul_(tile.slope).mul_(scores.scale)
            dq[tile.queries] = torch.einsum("bgij,jbd->ibgd", ds, keys)
            dk[tile.keys] += torch.einsum("bgij,ibgd->jbd", ds, queries)
        return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, mask: Mask, scores: Scores, wide: torch.dtype) -> Iterator[_Tile]:
    """The tiles of a block in which anything is seen."""
    if not scores.softcap:
        raise UsageError("softcap 0: this kernel is for capped scores only; give a softcap such as 50.0, or AtenFlash")
    bounds = _runs(mask, len(q), len(k))
    samples, (count, batch, group, _) = len(bounds.first), q.shape
    per_sample = batch // samples
    step = min(max(SCORES // (per_sample * group * len(k)), 1), ROWS)
    for sample in range(samples):
        heads = slice(sample * per_sample, (sample + 1) * per_sample)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            first, end = (x[sample, rows].unsqueeze(1) for x in bounds)
            keys = slice(int(first[0]), int(end[-1]))
            if keys.stop <= keys.start:
                continue
            at = torch.arange(keys.start, keys.stop)
            s = torch.einsum("ibgd,jbd->bgij", q[rows, heads].to(wide), k[keys, heads].to(wide))
            s.mul_(scores.scale / scores.softcap)
            slope = s.cosh().square_().reciprocal_()  # 1 - tanh² without its cancellation
            s.tanh_().mul_(scores.softcap).masked_fill_((at < first) | (at >= end), float("-inf"))
            yield _Tile((rows, heads), (keys, heads), s, slope)


def _runs(mask: Mask, rows: int, keys: int) -> Runs:
    if isinstance(mask, Runs):
        return mask
    end = torch.arange(1, rows + 1) if mask == CAUSAL else torch.full((rows,), keys)
    return Runs(torch.zeros(1, rows, dtype=torch.int32), end.int().unsqueeze(0))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Probabilities; 0 where a row sees nothing. Overwrites the scores."""
    return scores.sub_(lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_()
