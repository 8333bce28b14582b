"""Random attention problems, their exact answers, and the errors of others."""

from functools import cache

import torch

from tests.support.dense import dense_attention, visible

HEADS = [(4, 4), (8, 2), (6, 1)]

WHAT = ("out", "lse", "dq", "dk", "dv")

DIM = 16


@cache
def problem(n: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, dout of a whole sequence."""
    torch.manual_seed(n * 1000 + heads)
    length, batch = (n * 12, 2) if n < 16 else (n * 4, 1)
    return [torch.randn(length, batch, h, DIM).to(dtype) for h in (heads, kv_heads, kv_heads, heads)]


def gradients(function, q, k, v, dout) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of `function(q, k, v) -> (out, lse)`."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


@cache
def exact(n: int, heads: int, kv_heads: int, dtype: torch.dtype, causal: bool) -> list[torch.Tensor]:
    wide = [x.double() for x in problem(n, heads, kv_heads, dtype)]
    at = torch.arange(len(wide[0]))
    return gradients(lambda *x: dense_attention(*x, visible(at, at, causal)), *wide)


def errors(got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)]
