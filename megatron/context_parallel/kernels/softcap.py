"""Attention with capped scores on a CPU, in plain PyTorch: ATen's flash attention for CPUs has no softcap."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .interface import BlockGrad, Scores
from .masks import CAUSAL, KeyRanges, Piece, PieceMask, tiles

ROWS = 256  # maximum query rows of a tile
SCORES = 2**20  # maximum scores of all heads in a tile of several rows: limits memory, and fits the cache


class _Tile(NamedTuple):
    """The queries and keys of a tile (rows, heads), and which of the keys each row sees, bool [rows, keys]."""

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    visible: Tensor

    def of_queries(self, x: Tensor) -> Tensor:
        """A tensor [s, B, G, d] in this tile, in float32 or wider, with zeros in rows that see no key."""
        return _used(x[self.queries], self.visible.any(1))

    def of_keys(self, x: Tensor) -> Tensor:
        """A tensor [t, B, d] in this tile, in float32 or wider, with zeros in keys that no row sees."""
        return _used(x[self.keys], self.visible.any(0))

    def scores(self, queries: Tensor, keys: Tensor, how: Scores) -> tuple[Tensor, Tensor]:
        """Capped scores, -inf for unseen keys, and their derivative by the scaled scores, [B, G, rows, keys]."""
        s = torch.einsum("ibgd,jbd->bgij", queries, keys).mul_(how.scale / how.softcap)
        slope = s.cosh().square_().reciprocal_()  # 1 - tanh², without cancellation
        return s.tanh_().mul_(how.softcap).masked_fill_(~self.visible, float("-inf")), slope


class SoftcapCpu:
    """`kernels.Kernel` on CPU for scores with a softcap; always in float32 (float64 for float64)."""

    name = "softcap"

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        """The whole block in one piece: its tiles exclude keys that none of their queries sees."""
        return [Piece(slice(0, block.first.shape[1]), slice(0, keys), block)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        for tile in _tiles(q, k, mask, scores):
            s, _ = tile.scores(tile.of_queries(q), tile.of_keys(k), scores)
            stats = s.logsumexp(-1)
            out[tile.queries] = torch.einsum("bgij,jbd->ibgd", _weights(s, stats), tile.of_keys(v))
            lse[tile.queries] = stats.permute(2, 0, 1)
        return out, lse

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, lse, delta, mask = grad
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for tile in _tiles(q, k, mask, scores):
            queries, dout_rows = tile.of_queries(q), tile.of_queries(dout)
            keys, values = tile.of_keys(k), tile.of_keys(v)
            s, slope = tile.scores(queries, keys, scores)
            p = _weights(s, lse[tile.queries].permute(1, 2, 0))
            dv[tile.keys] += torch.einsum("bgij,ibgd->jbd", p, dout_rows)
            ds = torch.einsum("ibgd,jbd->bgij", dout_rows, values)
            ds.sub_(delta[tile.queries].permute(1, 2, 0).unsqueeze(-1)).mul_(p).mul_(slope).mul_(scores.scale)
            dq[tile.queries] = torch.einsum("bgij,jbd->ibgd", ds, keys)
            dk[tile.keys] += torch.einsum("bgij,ibgd->jbd", ds, queries)
        return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, mask: PieceMask, scores: Scores) -> Iterator[_Tile]:
    """The tiles of a block that see any key."""
    if not scores.softcap:
        raise UsageError("softcap 0: this kernel needs capped scores; give a softcap such as 50.0, or use AtenFlash")
    bounds = _key_ranges(mask, len(q), len(k))
    batch, group = q.shape[1:3]
    scores_of_a_row = batch // len(bounds.first) * group * len(k)
    step = min(max(SCORES // scores_of_a_row, 1), ROWS)
    for heads, rows, keys, visible in tiles(bounds, batch, step):
        yield _Tile((rows, heads), (keys, heads), visible)


def _used(x: Tensor, rows: Tensor) -> Tensor:
    """`x` in float32 or wider, with zeros outside of some rows: a weight of 0 does not remove NaN or infinity."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if rows.all() else x.masked_fill(~rows.view(-1, *[1] * (x.dim() - 1)), 0.0)


def _key_ranges(mask: PieceMask, rows: int, keys: int) -> KeyRanges:
    if isinstance(mask, KeyRanges):
        return mask
    end = torch.arange(1, rows + 1) if mask == CAUSAL else torch.full((rows,), keys)
    return KeyRanges(torch.zeros(1, rows, dtype=torch.int32), end.int().unsqueeze(0))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Probabilities; 0 in rows that see no key. Overwrites the scores."""
    return scores.sub_(lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_()
