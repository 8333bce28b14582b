"""PyTorch's own flash attention (ATen), on CPU and on CUDA."""

import torch
from torch import Tensor

from ..errors import UsageError

_ops = torch.ops.aten


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
    """Forward and backward of full and causal blocks.

    Shapes: queries [s, B, G, d], keys and values [t, B, d], log-sum-exp and delta [s, B, G] in float32 (float64 for
    float64); B is batch × key/value heads, G the query heads that share one. Causal blocks are square.

    On CPU 16-bit inputs are computed in float32: the kernel would round the gradients of each block, which summed
    over blocks is more error than one process makes, and its forward is no faster.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.cpu = device.type == "cpu"
        if not self.cpu and dtype not in (torch.float16, torch.bfloat16):
            raise UsageError(f"attention in {dtype} on {device.type}: flash attention there needs --bf16 or --fp16")

    def _widen(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.cpu:
            return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
        return tensors

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the output [s, B, G, d] in q's dtype or wider and its log-sum-exp [s, B, G]."""
        group = q.shape[2]
        q, k, v = self._widen(q, k, v)
        inputs = (_heads_first(q), _shared(k, group), _shared(v, group), 0.0, causal)
        if self.cpu:
            out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(*inputs, scale=scale)
        else:
            out, lse = _ops._scaled_dot_product_flash_attention(*inputs, scale=scale)[:2]
        return _rows_first(out), _rows_first(lse)

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
        """Returns dq [s, B, G, d] and dk, dv [t, B, d] of this block, in q's dtype or wider.

        `lse` and `delta` = rowsum(dout * out) are those of the whole sequence, so the gradients of the blocks add up.
        """
        group = q.shape[2]
        dout, q, k, v = self._widen(dout, q, k, v)
        out = _heads_first(_output_with(delta, dout))
        inputs = (_heads_first(dout), _heads_first(q), _shared(k, group), _shared(v, group), out)
        lse = lse.permute(1, 2, 0)
        if self.cpu:
            grads = _ops._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse, 0.0, causal, scale=scale)
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
                causal,
                seed,
                seed,
                scale=scale,
            )
        dq, dk, dv = (_rows_first(g) for g in grads)
        if group > 1:
            wide = torch.promote_types(q.dtype, torch.float32)
            return dq, dk.sum(2, dtype=wide), dv.sum(2, dtype=wide)
        return dq, dk.squeeze(2), dv.squeeze(2)
