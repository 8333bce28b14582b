"""Exact attention over a sequence that is sharded over a context group."""

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.interface import Kernel, Scores
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.kernels.quantized import QuantizedKernel
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.runtime.executor import Problem
from megatron.context_parallel.runtime.passes import forward
from megatron.context_parallel.runtime.sinks import add_sinks
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.handles import HandleOf, handle_of
from megatron.context_parallel.tokens.mask import Mask

from .context import AllRanks, ContextParallel
from .inputs import (
    autocast,
    check,
    check_kernel,
    check_partials,
    check_types,
    from_sbhd,
    refuse_jit_trace,
    to_sbhd,
)
from .torch_op import OpArgs, attention

PLAIN = (Tensor, torch.nn.Parameter)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel | AllRanks,
    *,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    documents: Documents | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: Kernel | None = None,
    kept: deque | None = None,
    tensor_layout: str = "sbhd",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v over the whole sequence, for this rank's tokens. Differentiable in q, k, v and sinks.

    Args:
        q: [s, b, heads, d], this rank's tokens in the order of `cp.positions` (all tokens for `AllRanks`). Under
            torch.autocast, q, k and v are cast to its dtype. They may be DTensors that the context group shards along
            the sequence, in the contiguous layout; then the output is one too.
        k: [t, b, kv_heads, d] of q's dtype; kv_heads divides heads. t differs from s in cross attention.
        v: [t, b, kv_heads, dv] of q's dtype.
        cp: the context group.
        causal: a token sees itself and the tokens before it; otherwise it sees all. The last query has the position of
            the last key, also with more keys than queries.
        window: maximum number of tokens before and after itself that a token sees; -1 for all.
        documents: the documents of the whole sequence, of each sample or common to all, the same object for each layer.
            A token sees only its own document. A token of no document gets output 0 and log-sum-exp -inf.
        scale: factor of the scores; default 1 / sqrt(d).
        softcap: scores x become softcap · tanh(x / softcap); 0 for none.
        sinks: [heads], an additional score per head that gets weight and has no value. 0 is softmax "off by one"; a
            parameter is the learnable sink of GPT-OSS. The log-sum-exp includes it. Each rank gets a partial gradient;
            the sum over the context group is the gradient.
        return_lse: also return the log-sum-exp of the scores.
        kernel: computes the blocks; default: the choice of `kernel_for`.
        kept: a queue for recomputation. A call without gradients appends its results. A call with gradients removes the
            oldest ones and computes no block; it swaps heads in one round, and nothing in several. They must be results
            of the same q, k and v.
        tensor_layout: the order of the dimensions of q, k, v, output and log-sum-exp: "sbhd", "bshd" or "bhsd".

    Returns:
        The output [s, b, heads, dv] in q's dtype. With `return_lse` also the log-sum-exp [s, b, heads], in float32
            (float64 for float64) and without gradients.

    Raises:
        UsageError: types, shapes, dtypes, heads or a sequence length that do not fit; an invalid context group;
            partials in 16 bits for wider inputs; a scale that is not positive and finite; a negative softcap;
            DTensors with other placements; second derivatives, forward-mode derivatives and the transforms of
            torch.func; `kernel` or `kept` under torch.compile.
    """
    if not isinstance(cp, (ContextParallel, AllRanks)):
        kind = type(cp).__name__
        raise UsageError(f"cp: of type {kind}; give a ContextParallel(strategy, group=...), not a mask tensor")
    check_kernel(kernel, kept)
    others = {"return_lse": return_lse, "kept": kept, "tensor_layout": tensor_layout}
    check_types(q, k, v, sinks, documents=documents, scale=scale, softcap=softcap, **others)
    q, k, v, placed = _local_inputs(q, k, v, sinks, cp, documents, tensor_layout)
    Mask(causal, window)  # raises UsageError if they are invalid
    own_kernel = None if kernel is None else HandleOf(kernel)
    results = HandleOf(kept.popleft()) if kept and torch.is_grad_enabled() else None
    args = OpArgs(
        cp=cp.handle,
        causal=causal,
        window=window,
        documents=handle_of(documents),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        softcap=float(softcap),
        kernel=handle_of(own_kernel),
    )
    out, lse, swapped = attention(q, k, v, sinks, handle_of(results), *args)
    if kept is not None and not torch.is_grad_enabled():
        kept.append((out, lse, *swapped[3:]))
    out, lse = from_sbhd(out, tensor_layout), from_sbhd(lse, tensor_layout)
    if placed:
        out, lse = placed(out), placed(lse)
    return (out, lse) if return_lse else out


def _local_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cp: ContextParallel | AllRanks,
    documents: Documents | None,
    tensor_layout: str,
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor] | None]:
    """q, k and v as [s, b, heads, d] in autocast's dtype; for DTensors their local parts, and a function that wraps a
    local result like q, else None."""
    placed = None
    refuse_jit_trace()
    if any(type(x) not in PLAIN for x in (q, k, v, sinks) if x is not None):
        from .dtensors import check_tokens, local_parts  # PyTorch's DTensor takes 0.7 s to import

        q, k, v, placed = local_parts(q, k, v, sinks, cp, tensor_layout.find("s"))
        if placed:
            check_tokens(cp, documents)
    q, k, v = autocast(q, k, v)
    check(q, k, v, sinks, tensor_layout)
    check_partials(cp.choice, q.dtype)
    q, k, v = (to_sbhd(x, tensor_layout) for x in (q, k, v))
    if not cp.keeps_swapped:  # saved as given; swapped heads are new tensors
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return q, k, v, placed


@torch.no_grad()
def attention_of_rows(
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    cp: ContextParallel | AllRanks,
    blocks: Blocks,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """softmax(q kᵀ · scale) v for any numbers of queries and keys on each rank, including none. Without gradients.

    Args:
        inputs: for each rank of this process q [s, b, heads, d], k [t, b, kv_heads, d] and v [t, b, kv_heads, dv], in
            the order of its chunks. With a `QuantizedKernel`, k and v are packed.
        cp: the context group, without head parallelism.
        blocks: the chunks of all ranks, the mask and the kernel; the same object for each layer.
        scale, sinks: as in `context_parallel_attention`.

    Returns:
        The outputs [s, b, heads, dv] of each rank of this process, in q's dtype.

    Raises:
        UsageError: shapes, dtypes or heads that do not fit; other numbers of rows than in `blocks`; head parallelism;
            partials in 16 bits for wider inputs.
    """
    packed = blocks.kernel if isinstance(blocks.kernel, QuantizedKernel) else None
    for rank, (q, k, v) in zip(cp.local_ranks, inputs, strict=True):
        check(q, *(packed.unpacked_like(q, k, v) if packed else (k, v)), sinks, smallest=0)
        check_partials(cp.choice, q.dtype)
        rows, expected = (len(q), len(k)), (blocks.q.rows[rank], blocks.kv.rows[rank])
        if rows != expected:
            raise UsageError(f"rank {rank}: {rows} rows of queries and keys, but its chunks have {expected}")
    q, k, _ = inputs[0]
    scores = Scores(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if cp.n == 1:
        return [_of_one_rank(blocks, scores, sinks, *inputs[0])]
    plan = cp.plans.full(q.shape[2], k.shape[2])
    if (parts := plan.head_parallel_size) > 1:
        raise UsageError(f"--cp-head-parallel-size {parts}: head parallelism needs chunks of equal size; give 1")
    problem = Problem(blocks, k.shape[2], blocks.kernel, scores, value_dim=packed.value_dim if packed else None)
    results = cp.run(forward, plan, problem, [(sinks, *part) for part in inputs])
    return [out for out, *_ in results]


def _of_one_rank(blocks: Blocks, scores: Scores, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The single block of a one-rank plan, without the plan: in decoding, the plan would take as long as the block."""
    s, b, heads, d = q.shape
    kv_heads = v.shape[2]
    queries = q.reshape(s, b * kv_heads, heads // kv_heads, d)
    keys = k.flatten(1, 2)
    values = v.flatten(1, 2)
    pieces = blocks.pieces(0, (0,))
    results = (blocks.kernel.forward(queries[p.q], keys[p.kv], values[p.kv], p.mask, scores) for p in pieces)
    rows = [p.q.indices(s)[:2] for p in pieces]
    if _one_after_another(rows, s):
        out, lse = next(results) if len(pieces) == 1 else map(torch.cat, zip(*results, strict=True))
    else:
        value_dim = blocks.kernel.value_dim if isinstance(blocks.kernel, QuantizedKernel) else v.shape[-1]
        out = q.new_zeros((*queries.shape[:3], value_dim), dtype=torch.promote_types(q.dtype, torch.float32))
        lse = q.new_full(queries.shape[:3], -math.inf, dtype=torch.float64)
        done = 0  # rows before it may already have a result
        for piece, (start, stop), result in zip(pieces, rows, results, strict=True):
            if start < done:
                merge(out[piece.q], lse[piece.q], *result)
            else:
                out[piece.q], lse[piece.q] = result
            done = max(done, stop)
    out = out.reshape(s, b, heads, out.shape[-1])
    if sinks is not None:
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        add_sinks(out, lse.reshape(s, b, heads), sinks)
    return out.to(q.dtype)


def _one_after_another(rows: list[tuple[int, int]], count: int) -> bool:
    """Whether each of `count` rows is in one of these ranges, in their order."""
    end = 0
    for start, stop in rows:
        if start != end:
            return False
        end = stop
    return bool(rows) and end == count
