"""Exact attention over a sequence that the ranks of a context group share."""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Blocks
from .context import AllRanks, ContextParallel, Lengths
from .errors import UsageError
from .executor import Executor, Problem
from .heads import HeadGroup
from .kernels import Kernel, Scores
from .kernels.choose import kernel_for
from .mask import Documents, Mask
from .plan.ir import Plan, T
from .recorder import recorder
from .sinks import add_sinks, sink_gradients
from .transport import Program, Transport

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v over the whole sequence, for this rank's tokens. Differentiable in q, k, v and sinks.

    Args:
        q: [s, b, heads, d], this rank's tokens in the order of `cp.positions` (all tokens for `AllRanks`).
        k: [t, b, kv_heads, d] of q's dtype; kv_heads divides heads. t differs from s in cross attention.
        v: [t, b, kv_heads, dv] of q's dtype.
        cp: the context group.
        causal: a token sees itself and the tokens before it; otherwise it sees all. The last query has the position of
            the last key, also with more keys than queries.
        window: how many tokens before and after itself a token sees at most; -1 for all.
        documents: the documents of the whole sequence, the same object for each layer. A token sees only its own
            document. A token of no document gets output 0 and log-sum-exp -inf.
        scale: factor of the scores; default 1 / sqrt(d).
        softcap: scores x become softcap · tanh(x / softcap); 0 for none.
        sinks: [heads], one more score per head that takes weight and has no value. 0 is softmax "off by one"; a
            parameter is the learnable sink of GPT-OSS. The log-sum-exp includes it. Each rank gets a part of its
            gradient; the sum over the context group is the gradient.
        return_lse: also return the log-sum-exp of the scores.
        kernel: computes the blocks; default: the one that `kernel_for` chooses.
        kept: a queue for recomputation. A call without gradients adds its results. A call with gradients takes the
            oldest ones, computes no block, and sends nothing but swapped heads. They must be of the same q, k and v.

    Returns:
        The output [s, b, heads, dv] in q's dtype. With `return_lse` also the log-sum-exp [s, b, heads], in float32
            (float64 for float64) and without gradients.

    Raises:
        UsageError: shapes, dtypes, heads or a sequence length that do not fit; a scale that is not positive and finite;
            a negative softcap; second derivatives.
    """
    _check(q, k, v, sinks)
    mask, lengths = Mask(causal, window, documents), (cp.length(q), cp.length(k))
    _check_documents(documents, q.shape[1], *lengths)
    plan = cp.plan(mask, lengths, q.shape[2], k.shape[2], backward=False)
    scores = Scores(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap)
    kernel = kernel or kernel_for(q.device, q.dtype, q.shape[-1], value_dim=v.shape[-1], softcap=softcap)
    problem = Problem(cp.blocks(mask, lengths, kernel), k.shape[2], kernel, scores)
    call = _Call(cp, mask, lengths, q.shape[2], plan, problem, recorder.position.layer)
    again = kept.popleft() if kept and torch.is_grad_enabled() else None
    out, lse = _Attention.apply(q, k, v, sinks, call, again, None if torch.is_grad_enabled() else kept)
    return (out, lse) if return_lse else out


@torch.no_grad()
def attention_of_rows(
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    cp: ContextParallel | AllRanks,
    blocks: Blocks,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """softmax(q kᵀ · scale) v where each rank has any number of queries and of keys, also none. Without gradients.

    Args:
        inputs: of each rank of this process q [s, b, heads, d], k [t, b, kv_heads, d] and v [t, b, kv_heads, dv], in
            the order of its chunks.
        cp: the context group, without head parallelism.
        blocks: the chunks of all ranks, the mask and the kernel; the same object for each layer.
        scale, softcap, sinks: as in `context_parallel_attention`.

    Returns:
        The outputs [s, b, heads, dv] of each rank of this process, in q's dtype.

    Raises:
        UsageError: shapes, dtypes or heads that do not fit; other rows than `blocks` has; head parallelism.
    """
    for rank, (q, k, v) in zip(cp.here, inputs, strict=True):
        _check(q, k, v, sinks, smallest=0)
        given, chunks = (len(q), len(k)), (blocks.q.rows(rank), blocks.kv.rows(rank))
        if given != chunks:
            raise UsageError(f"rank {rank}: {given} rows of queries and keys where its chunks have {chunks}")
    q, k, _ = inputs[0]
    plan = cp.full_plan(q.shape[2], k.shape[2])
    if plan.heads > 1:
        raise UsageError(f"--cp-head-parallel-size {plan.heads}: chunks of any rows have no head parallelism; give 1")
    problem = Problem(
        blocks, k.shape[2], blocks.kernel, Scores(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap)
    )
    return [out for out, *_ in cp.run(_forward, plan, problem, [(sinks, *part) for part in inputs])]


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, smallest: int = 1) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[1::2] != k.shape[1::2]:
        raise UsageError(f"{shapes}: need q [s, b, heads, d], k [t, b, kv_heads, d] and v [t, b, kv_heads, dv]")
    if 0 in (*q.shape[1:], *k.shape[1:], *v.shape[1:]) or min(len(q), len(k)) < smallest:
        raise UsageError(f"{shapes}: a size is 0; each must be 1 or more")
    if q.shape[2] % k.shape[2]:
        raise UsageError(f"{k.shape[2]} key/value heads do not divide {q.shape[2]} query heads")
    if not q.dtype == k.dtype == v.dtype:
        raise UsageError(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: need one dtype")
    if q.dtype not in DTYPES:
        raise UsageError(f"q, k, v of {q.dtype}: need one of {', '.join(map(str, DTYPES))}")
    if not q.device == k.device == v.device:
        raise UsageError(f"q, k, v on {q.device}, {k.device}, {v.device}: need one device")
    if sinks is not None and (sinks.shape != q.shape[2:3] or not sinks.is_floating_point() or sinks.device != q.device):
        raise UsageError(
            f"sinks {list(sinks.shape)} of {sinks.dtype} on {sinks.device}: need floating-point [{q.shape[2]}], one a "
            f"query head, on {q.device}"
        )


def _check_documents(documents: Documents | None, batch: int, q_length: int, kv_length: int) -> None:
    if documents is None:
        return
    if q_length != kv_length:
        raise UsageError(f"documents with {q_length} queries and {kv_length} keys: need queries and keys of one length")
    if documents.shape not in ((1, q_length), (batch, q_length)):
        raise UsageError(
            f"documents of {list(documents.shape)} samples and tokens: need [1 or {batch}, {q_length}], the whole "
            "sequence on every rank"
        )


@dataclass(frozen=True)
class _Call:
    """What a call's two passes share beside tensors."""

    cp: ContextParallel | AllRanks
    mask: Mask
    lengths: Lengths
    heads: int
    plan: Plan
    problem: Problem
    layer: int  # as recorded


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, call, again, keep):
        cp = call.cp
        parts = [(sinks, *part) for part in zip(cp.split(q), cp.split(k), cp.split(v), strict=True)]
        ctx.call = call
        if again:
            parts = [(*part, *results) for part, results in zip(parts, again, strict=True)]
        ranks = cp.run(_recall if again else _forward, call.plan, call.problem, parts)
        outs, lses, *saved = zip(*ranks, strict=True)
        if keep is not None:
            keep.append([*zip(outs, lses, saved[-1], strict=True)])
        ctx.save_for_backward(sinks, *outs, *(x for of_ranks in saved for x in of_ranks))
        out, lse = cp.join(outs), cp.join(lses)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        call, (sinks, *saved) = ctx.call, ctx.saved_tensors
        cp = call.cp
        recorder.at_layer(call.layer)
        with torch.no_grad():
            douts = cp.split(dout)
            ranks = len(douts)
            of_ranks = zip(douts, *(saved[i : i + ranks] for i in range(0, len(saved), ranks)), strict=True)
            plan = cp.plan(call.mask, call.lengths, call.heads, call.problem.kv_heads, backward=True)
            results = cp.run(_backward, plan, call.problem, [(sinks, *part) for part in of_ranks])
            dsinks, *grads = zip(*results, strict=True)
            grads = [*map(cp.join, grads), None if sinks is None else sum(dsinks)]
        if torch.is_grad_enabled():  # create_graph
            grads = _Once.apply(*(g if g is None else g.requires_grad_() for g in grads))
        return *grads, None, None, None


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx, *grads):
        return grads

    @staticmethod
    def backward(ctx, *_):
        raise UsageError(
            "second derivatives: context_parallel_attention has first derivatives only; differentiate once, "
            "without create_graph=True"
        )


def _forward(
    plan: Plan,
    problem: Problem,
    rank: int,
    transport: Transport,
    sinks: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Program[tuple[Tensor, ...]]:
    """A rank's output and log-sum-exp, and what its backward pass needs besides the output."""
    group = HeadGroup(plan, rank, transport)
    heads, b, dtype = q.shape[2], q.shape[1], q.dtype
    q, k, v = yield from _folded(group, q, k, v)
    executor = Executor(plan, group.context_rank, problem, group.context, {T.Q: (q,), T.KV: (k, v)})
    out, lse = (yield from executor.run())[T.O]
    out, lse = (x.view(len(x), b, q.shape[1] * q.shape[2] // b, *x.shape[3:]) for x in (out, lse))
    if sinks is not None:
        lse = add_sinks(out, lse, sinks[group.slice_of(heads)])
    ours = yield from group.to_chunks(out.to(dtype), lse)
    return *ours, q, k, v, lse.view(q.shape[:-1])


def _recall(
    plan: Plan,
    problem: Problem,
    rank: int,
    transport: Transport,
    sinks: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *results: Tensor,
) -> Program[tuple[Tensor, ...]]:
    """What `_forward` returned, from inputs computed again and its output and log-sum-exps."""
    q, k, v = yield from _folded(HeadGroup(plan, rank, transport), q, k, v)
    out, lse, inner_lse = results
    return out, lse, q, k, v, inner_lse


def _folded(group: HeadGroup, q: Tensor, k: Tensor, v: Tensor) -> Program[tuple[Tensor, ...]]:
    """Queries, keys and values of this rank's heads, as the executor takes them."""
    q, k, v = yield from group.to_heads(q, k, v)
    s, b, heads, d = q.shape
    q = q.reshape(s, b * k.shape[2], heads // k.shape[2], d).contiguous()
    return q, *(x.flatten(1, 2).contiguous() for x in (k, v))


def _backward(
    plan: Plan,
    problem: Problem,
    rank: int,
    transport: Transport,
    sinks: Tensor | None,
    dout: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
) -> Program[tuple[Tensor | None, ...]]:
    """A rank's gradients of sinks, queries, keys and values; `q`, `k`, `v` and `lse` are what `_forward` kept."""
    group = HeadGroup(plan, rank, transport)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dout, delta = yield from group.to_heads(dout, delta)
    dsinks = None
    if sinks is not None:
        dsinks, part = torch.zeros_like(sinks), group.slice_of(len(sinks))
        dsinks[part] = sink_gradients(lse.view(delta.shape), delta, sinks[part])
    folded = dout.reshape(*q.shape[:-1], -1).contiguous()
    inputs = {T.QDO: (q, folded, lse, delta.reshape(lse.shape)), T.KV: (k, v)}
    ends = yield from Executor(plan, group.context_rank, problem, group.context, inputs).run()
    b = dout.shape[1]
    dq = ends[T.DQ][0].to(q.dtype).view(*dout.shape[:-1], -1)
    dkv = (x.view(len(x), b, -1, x.shape[-1]) for x in ends[T.DKV])
    if plan.heads <= problem.kv_heads:
        return dsinks, *(yield from group.to_chunks(dq, *(x.to(q.dtype) for x in dkv)))
    dq, *replicas = yield from group.to_chunks(dq, *dkv)  # each a partial sum
    dk, dv = (x.unflatten(2, (problem.kv_heads, -1)).sum(3).to(q.dtype) for x in replicas)
    return dsinks, dq, dk, dv
