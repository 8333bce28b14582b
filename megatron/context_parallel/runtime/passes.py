"""The passes of one rank: swap heads, execute a plan, swap heads back."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.context_parallel.kernels.delta import delta_of
from megatron.context_parallel.plan.ir import Plan, T

from .comm.transport import Program, Transport, Work
from .executor import Executor, Problem
from .head_swap import HeadGroup
from .rounds import Results, in_rounds, rows_of
from .sinks import add_sinks, sink_gradients


def forward(
    plan: Plan,
    problem: Problem,
    rank: int,
    transport: Transport,
    sinks: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Program[tuple[Tensor, ...]]:
    """A rank's output [s, b, heads, dv] and log-sum-exp [s, b, heads].

    If the plan has one round of heads, also the executor's q, k, v and log-sum-exp, of all rounds of tokens.
    """
    group = HeadGroup(plan, rank, transport)
    heads, dtype = q.shape[2], q.dtype
    kept, kept_lses = list[Tensor](), list[Tensor]()  # with one round of heads, for the backward pass

    def compute(round_index: int, meanwhile: Iterable[Work], *swapped: Tensor) -> Program[Program[Results]]:
        b, own_heads = swapped[0].shape[1:3]
        q, k, v = folded = fold_heads(*swapped)
        if plan.token_rounds > 1:
            if round_index == 0:
                kept[:] = [x.new_empty(plan.token_rounds * len(x), *x.shape[1:]) for x in folded]
            for whole, x in zip(kept, folded, strict=True):
                rows_of(plan, whole, round_index).copy_(x)
            k, v = (whole[: (round_index + 1) * len(q)] for whole in kept[1:])
        elif plan.head_rounds == 1:
            kept[:] = folded
        part = problem.of_range(plan.range_of(round_index))
        executor = Executor(plan, group.context_rank, part, group.context, {T.Q: (q,), T.KV: (k, v)})
        yield from executor.run(meanwhile)
        return results(executor, round_index, b, own_heads)

    def results(executor: Executor, round_index: int, b: int, own_heads: int) -> Program[Results]:
        folded_out, folded_lse = (yield from executor.results())[T.O]
        out, lse = (x.view(len(x), b, own_heads, *x.shape[3:]) for x in (folded_out, folded_lse))
        if sinks is not None:
            lse = add_sinks(out, lse, sinks[group.slice_of(heads, round_index)])
        if kept:
            kept_lses.append(lse.view(folded_lse.shape))
        return [out.to(dtype), lse]

    out, lse = yield from in_rounds(group, (q, k, v), compute)
    if kept:
        kept.append(torch.cat(kept_lses) if len(kept_lses) > 1 else kept_lses[0])
    return out, lse, *kept


def swap(
    plan: Plan, problem: Problem, rank: int, transport: Transport, q: Tensor, k: Tensor, v: Tensor
) -> Program[tuple[Tensor, ...]]:
    """Only the executor's queries, keys and values of `forward`, for a plan that keeps them."""
    group = HeadGroup(plan, rank, transport)
    return fold_heads(*(yield from group.to_heads((q, k, v), 0).wait()))


def fold_heads(q: Tensor, k: Tensor, v: Tensor, *lses: Tensor) -> tuple[Tensor, ...]:
    """The executor's queries [s, B, G, d], keys and values [s, B, d] (and log-sum-exps [s, B, G]), for some heads.

    Args:
        q: [s, b, heads, d]; k, v: [s, b, kv_heads, d]; lses: [s, b, heads].
    """
    s, b, heads, d = q.shape
    rows = s, b * k.shape[2], heads // k.shape[2]
    folded = q.reshape(*rows, d), k.flatten(1, 2), v.flatten(1, 2), *[lse.reshape(rows) for lse in lses]
    return tuple([x.contiguous() for x in folded])


def backward(
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
    """A rank's gradients of sinks, queries, keys and values.

    `q`, `k`, `v` and `lse` are the executor's, or those of the rank's own tokens if the plan has several rounds. The
    gradient of the sinks is the sum over the rank's tokens and heads, zero for other heads. It has the dtype of `lse`,
    because it is summed over the ranks before it is rounded.
    """
    group = HeadGroup(plan, rank, transport)
    delta = delta_of(dout, out, lse.dtype)
    dsinks = None if sinks is None else lse.new_zeros(len(sinks))
    swaps_inputs = plan.head_rounds > 1
    key_grads: list[Tensor] = []  # with rounds of tokens: the sums of the gradients of keys and values so far
    shared = plan.head_parts > problem.kv_heads  # ranks or rounds have partial sums of the gradient of a key/value head

    def compute(
        round_index: int, meanwhile: Iterable[Work], dout: Tensor, delta: Tensor, *swapped: Tensor
    ) -> Program[Program[Results]]:
        inputs = fold_heads(*swapped) if swaps_inputs else _of_token_round(plan, round_index, q, k, v, lse)
        folded_q, folded_k, folded_v, folded_lse = inputs
        if sinks is not None and dsinks is not None:
            own_heads = group.slice_of(len(sinks), round_index)
            dsinks[own_heads] += sink_gradients(folded_lse.view(delta.shape), delta, sinks[own_heads])
        folded_dout = dout.reshape(*folded_q.shape[:-1], -1).contiguous()
        queries = folded_q, folded_dout, folded_lse, delta.reshape(folded_lse.shape)
        part = problem.of_range(plan.range_of(round_index))
        executor = Executor(plan, group.context_rank, part, group.context, {T.QDO: queries, T.KV: (folded_k, folded_v)})
        yield from executor.run(meanwhile)
        return results(executor, round_index, dout.shape[1])

    def results(executor: Executor, round_index: int, b: int) -> Program[Results]:
        ends = yield from executor.results()
        (dq,), dkv = ends[T.DQ], ends[T.DKV]
        if plan.token_rounds > 1:
            _add_key_grads(key_grads, dkv)
            dkv = tuple([rows_of(plan, total, round_index) for total in key_grads])  # no later round adds to them
        dq, dk, dv = (x.view(len(x), b, -1, x.shape[-1]) for x in (dq.to(q.dtype), *dkv))
        return [dq, dk, dv] if shared else [dq, dk.to(q.dtype), dv.to(q.dtype)]

    tensors = (dout, delta, q, k, v, lse) if swaps_inputs else (dout, delta)
    dq, dk, dv = yield from in_rounds(group, tensors, compute, problem.kv_heads if shared else None)
    return dsinks, dq, dk.to(q.dtype), dv.to(q.dtype)


def _of_token_round(plan: Plan, round_index: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """The queries and log-sum-exps of a round of tokens, with all keys and values up to its end."""
    if plan.token_rounds == 1:
        return q, k, v, lse
    queries = rows_of(plan, q, round_index)
    seen = slice((plan.range_of(round_index) + 1) * len(queries))
    return queries, k[seen], v[seen], rows_of(plan, lse, round_index)


def _add_key_grads(totals: list[Tensor], key_grads: Iterable[Tensor]) -> None:
    """Adds the gradients of a round of tokens, for all keys up to its end, to those of the rounds before.

    The first round is that of the last tokens, so it has gradients for all keys.
    """
    if not totals:
        totals[:] = key_grads
        return
    for total, gradient in zip(totals, key_grads, strict=True):
        total[: len(gradient)] += gradient
