"""The passes of one rank: swap heads, execute a plan, swap heads back."""

from torch import Tensor

from megatron.context_parallel.plan.ir import Plan, T

from .comm.transport import Program, Transport
from .executor import Executor, Problem
from .head_swap import HeadGroup
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
    """A rank's output and log-sum-exp, and the executor's queries, keys, values and log-sum-exp."""
    group = HeadGroup(plan, rank, transport)
    heads = q.shape[2]
    b = q.shape[1]
    dtype = q.dtype
    q, k, v = yield from _folded(group, q, k, v)
    executor = Executor(plan, group.context_rank, problem, group.context, {T.Q: (q,), T.KV: (k, v)})
    out, lse = (yield from executor.run())[T.O]
    out, lse = (x.view(len(x), b, q.shape[1] * q.shape[2] // b, *x.shape[3:]) for x in (out, lse))
    if sinks is not None:
        lse = add_sinks(out, lse, sinks[group.slice_of(heads)])
    ours = yield from group.to_chunks(out.to(dtype), lse)
    return *ours, q, k, v, lse.view(q.shape[:-1])


def swap(
    plan: Plan, problem: Problem, rank: int, transport: Transport, q: Tensor, k: Tensor, v: Tensor
) -> Program[tuple[Tensor, ...]]:
    """Only the executor's queries, keys and values of `forward`."""
    return (yield from _folded(HeadGroup(plan, rank, transport), q, k, v))


def _folded(group: HeadGroup, q: Tensor, k: Tensor, v: Tensor) -> Program[tuple[Tensor, ...]]:
    q, k, v = yield from group.to_heads(q, k, v)
    return fold_heads(q, k, v)


def fold_heads(q: Tensor, k: Tensor, v: Tensor, *lses: Tensor) -> tuple[Tensor, ...]:
    """The executor's queries, keys, values (and log-sum-exp), for some heads."""
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
    """A rank's gradients of sinks, queries, keys and values; `q`, `k`, `v` and `lse` are the executor's.

    The gradient of the sinks is the sum over the rank's tokens and heads, zero for other heads. It has the dtype of
    `lse`, because it is summed over the ranks before it is rounded.
    """
    group = HeadGroup(plan, rank, transport)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dout, delta = yield from group.to_heads(dout, delta)
    dsinks = None
    if sinks is not None:
        ours = group.slice_of(len(sinks))
        dsinks = lse.new_zeros(len(sinks))
        dsinks[ours] = sink_gradients(lse.view(delta.shape), delta, sinks[ours])
    folded = dout.reshape(*q.shape[:-1], -1).contiguous()
    inputs = {T.QDO: (q, folded, lse, delta.reshape(lse.shape)), T.KV: (k, v)}
    ends = yield from Executor(plan, group.context_rank, problem, group.context, inputs).run()
    b = dout.shape[1]
    dq = ends[T.DQ][0].to(q.dtype).view(*dout.shape[:-1], -1)
    dk, dv = (x.view(len(x), b, -1, x.shape[-1]) for x in ends[T.DKV])
    if plan.heads <= problem.kv_heads:
        grads = yield from group.to_chunks(dq, dk.to(q.dtype), dv.to(q.dtype))
        return dsinks, *grads
    # Ranks that share a key/value head have partial sums of its gradient, which return side by side.
    dq, *replicas = yield from group.to_chunks(dq, dk, dv)
    dk, dv = (x.unflatten(2, (problem.kv_heads, -1)).sum(3).to(q.dtype) for x in replicas)
    return dsinks, dq, dk, dv
