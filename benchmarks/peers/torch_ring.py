"""PyTorch's own ring attention (torch.distributed.tensor.experimental), with its head-tail (zigzag) load balancing.

`context_parallel` itself supports only CUDA's kernels, so this calls the ring below it with the CPU kernel.
"""

import math

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as experimental

from megatron.context_parallel.tokens.layout import positions


class Adapter:
    order = "bshd"

    def __init__(self, problem, group, flash, rotate="alltoall"):
        if problem.kv_heads != problem.heads:
            raise ValueError("PyTorch's ring takes as many key/value heads as query heads")
        self.problem, self.group, self.rotate, self.flash = problem, group, rotate, flash

    def positions(self, length):
        layout = "zigzag" if self.problem.causal else "contiguous"
        return positions(layout, self.group.rank(), self.problem.ranks, length)

    def attend(self, q, k, v):
        experimental.set_rotate_method(self.rotate)
        experimental._cp_options.enable_load_balance = self.problem.causal
        return _Ring.apply(*(x.transpose(1, 2) for x in (q, k, v)), self).transpose(1, 2)

    def forward_op(self, q, k, v, is_causal, scale):
        """The kernel as the ring calls it, [b, heads, s, d]."""
        out, lse = self.flash.forward(*(x.transpose(1, 2) for x in (q, k, v)), scale, is_causal)
        return out.transpose(1, 2), lse

    def backward_op(self, grad_out, query, key, value, out, logsumexp, is_causal, scale, dropout_p):
        rows_first = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        grads = self.flash.backward(*rows_first, logsumexp, scale, is_causal)
        return tuple(x.transpose(1, 2) for x in grads)


class _Ring(torch.autograd.Function):
    """Forward and backward of the ring, [b, heads, s, d]; PyTorch offers them as two functions."""

    @staticmethod
    def forward(ctx, q, k, v, adapter):
        ctx.adapter = adapter
        ctx.how = {"is_causal": adapter.problem.causal, "scale": 1 / math.sqrt(q.shape[-1])}
        out, lse = experimental._templated_ring_attention(adapter.group, 2, adapter.forward_op, q, k, v, **ctx.how)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        passed = (ctx.adapter.group, 2, ctx.adapter.backward_op, dout, "grad_out", *ctx.saved_tensors)
        grads = experimental._templated_ring_attention_backward(*passed, dropout_p=0.0, **ctx.how)
        return *grads[:3], None
