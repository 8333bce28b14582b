"""PyTorch's own flash attention (ATen), on CPU and on CUDA."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import UsageError
from .masks import CAUSAL, Mask, Piece, Runs, cut

TILE = 256  # query rows of irregular masks computed at a time on CPU
_ops = torch.ops.aten
_backward_cpu = _ops._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x: Tensor) -> Tensor:
    """[s, B, G, d] to [B, G, s, d], as the kernels take it; a view."""
    return x.permute(1, 2, 0, 3)


def _shared(x: Tensor, group: int) -> Tensor:
    """Keys or values [s, B, d] to [B, group, s, d]: one head read by all queries of its group, without a copy."""
    return x.unsqueeze(2).expand(-1, -1, group, -1).permute(1, 2, 0, 3)


def _rows_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3) if x.dim() == 4 else x.permute(2, 0, 1)


def _output_with(delta: Tensor, dout: Tensor) -> Tensor:
    """A stand-in for the output: ATen's backward uses it only in rowsum(dout * out), which this makes delta."""
    wide = dout.to(torch.promote_types(dout.dtype, torch.float32))
    norm = wide.square().sum(-1).clamp_min(torch.finfo(wide.dtype).tiny)
    return (wide * (delta / norm).unsqueeze(-1)).to(dout.dtype)


class AtenFlash:
    """`kernels.Kernel` by ATen; on CUDA without runs.

    On CPU 16-bit inputs are computed in float32: the kernel would round the gradients of each block, which summed
    over blocks is more error than one process makes, and its forward is no faster.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.cpu = device.type == "cpu"
        if not self.cpu and dtype not in (torch.float16, torch.bfloat16):
            raise UsageError(f"attention in {dtype} on {device.type}: flash attention there needs --bf16 or --fp16")

    def pieces(self, block: Runs, keys: int) -> list[Piece]:
        return cut(block)

    def _widen(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.cpu:
            return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
        return tensors

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> tuple[Tensor, Tensor]:
        group = q.shape[2]
        q, k, v = self._widen(q, k, v)
        q, k, v = _heads_first(q), _shared(k, group), _shared(v, group)
        if isinstance(mask, Runs):
            out, lse = _forward_runs(q, k, v, mask, scale)
        elif self.cpu:
            out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask == CAUSAL, scale=scale)
        else:
            out, lse = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, mask == CAUSAL, scale=scale)[:2]
        return _rows_first(out), _rows_first(lse)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: Mask,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[2]
        dout, q, k, v = self._widen(dout, q, k, v)
        out = _heads_first(_output_with(delta, dout))
        inputs = (_heads_first(dout), _heads_first(q), _shared(k, group), _shared(v, group), out)
        lse = lse.permute(1, 2, 0)
        if isinstance(mask, Runs):
            grads = _backward_runs(*inputs, lse, mask, scale)
        elif self.cpu:
            grads = _backward_cpu(*inputs, lse, 0.0, mask == CAUSAL, scale=scale)
        else:
            seed = torch.zeros((), dtype=torch.uint64, device=q.device)
            grads = _ops._scaled_dot_product_flash_attention_backward(
                *inputs,
                lse.contiguous(),
                None,
                None,
                q.shape[0],
                k.shape[0],
                0.0,
                mask == CAUSAL,
                seed,
                seed,
                scale=scale,
            )
        dq, dk, dv = (_rows_first(g) for g in grads)
        if group > 1:
            wide = torch.promote_types(q.dtype, torch.float32)
            return dq, dk.sum(2, dtype=wide), dv.sum(2, dtype=wide)
        return dq, dk.squeeze(2), dv.squeeze(2)


def _tiles(mask: Runs, batch: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """(heads, rows, keys, what to add to their scores [rows, keys]) of the tiles in which anything is seen."""
    samples, count = mask.first.shape
    for sample in range(samples):
        heads = slice(sample * batch // samples, (sample + 1) * batch // samples)
        for start in range(0, count, TILE):
            rows = slice(start, min(start + TILE, count))
            first, end = (x[sample, rows].unsqueeze(1) for x in mask)
            keys = slice(int(first[0]), int(end[-1]))
            if keys.stop > keys.start:
                at = torch.arange(keys.start, keys.stop)
                yield heads, rows, keys, torch.where((at >= first) & (at < end), 0.0, float("-inf"))


def _forward_runs(q: Tensor, k: Tensor, v: Tensor, mask: Runs, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for heads, rows, keys, added in _tiles(mask, len(q)):
        inputs = q[heads, :, rows], k[heads, :, keys], v[heads, :, keys], 0.0, False
        out[heads, :, rows], lse[heads, :, rows] = _ops._scaled_dot_product_flash_attention_for_cpu(
            *inputs, attn_mask=added.to(q.dtype), scale=scale
        )
        blind = slice(None), slice(None), added.isneginf().all(1)
        out[heads, :, rows][blind], lse[heads, :, rows][blind] = 0.0, float("-inf")  # ATen says 0 for both
    return out, lse


def _backward_runs(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Runs, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    lse = lse.masked_fill(lse.isneginf(), 0.0)  # of rows that see nothing anywhere
    for heads, rows, keys, added in _tiles(mask, len(q)):
        queries, seen = (heads, slice(None), rows), (heads, slice(None), keys)
        grads = _backward_cpu(
            *(dout[queries], q[queries], k[seen], v[seen], out[queries], lse[queries], 0.0, False),
            attn_mask=added.to(q.dtype),
            scale=scale,
        )
        for into, grad in zip((dq[queries], dk[seen], dv[seen]), grads, strict=True):
            into.add_(grad)
    return dq, dk, dv
