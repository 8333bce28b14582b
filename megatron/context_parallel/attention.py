"""Exact attention over a sequence that the ranks of a context group share."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UsageError
from .executor import Executor, Problem
from .heads import HeadGroup, check_heads
from .kernels import Kernel, kernel_for
from .layout import positions, shard, unshard
from .plan.ir import Plan, T
from .plan.verify import verify
from .strategies import find_strategy
from .transport import LocalTransport, Program, TorchTransport, Transport, run_all, run_here

VERIFY_UP_TO = 64  # ranks; beyond, the symbolic run takes longer than a launch should


class _Strategy:
    """A strategy, its layout and options, and its plans for n ranks, each verified when first made."""

    def __init__(self, strategy: str, layout: str | None, n: int, options: dict[str, object]) -> None:
        self.strategy, self.n, self.options = find_strategy(strategy), n, options
        self.layout = layout or self.strategy.layouts[0]
        self._plans: dict[tuple[bool, bool], Plan] = {}
        plan = self.plan(causal=True, backward=False)
        self.chunks = [plan.chunk_of(r) for r in range(n)]  # of each rank

    def plan(self, *, causal: bool, backward: bool) -> Plan:
        """The plan of one pass.

        Raises:
            UsageError: a layout the strategy does not work with.
        """
        if (causal, backward) not in self._plans:
            plan = self.strategy.plan(self.n, layout=self.layout, causal=causal, backward=backward, **self.options)
            if plan.n <= VERIFY_UP_TO:
                verify(plan)
            self._plans[causal, backward] = plan
        return self._plans[causal, backward]


class ContextParallel(_Strategy):
    """A context group and how it computes attention. Make one per group and keep it: it holds communicators.

    Args:
        strategy: `--cp-strategy`, a key of `strategies.STRATEGIES`.
        layout: `--cp-layout`; default: the strategy's own.
        group: the ranks that share a sequence; default: the world.
        options: `head_parallel_size`, `placement`, and those of the strategy.

    Attributes:
        chunk: the chunk of the sequence this rank owns; its rank in the group unless a placement moves the data.

    Raises:
        UsageError: an unknown strategy, or a layout or option it does not work with.
    """

    def __init__(
        self,
        strategy: str = "ring",
        layout: str | None = None,
        group: dist.ProcessGroup | None = None,
        **options: object,
    ) -> None:
        group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        self._transport = TorchTransport(group)
        super().__init__(strategy, layout, dist.get_world_size(group), options)
        self.chunk = self.chunks[self.rank]

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's tokens of a full sequence: [..., length, ...] to [..., length / n, ...] along `dim`."""
        return shard(x, self.layout, self.chunk, self.n, dim)

    def positions(self, length: int) -> Tensor:
        """Positions of this rank's tokens, int64 [length / n], in local order."""
        return positions(self.layout, self.chunk, self.n, length)

    def split(self, x: Tensor) -> list[Tensor]:
        return [x]

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def run(self, program: Callable[..., Program], plan: Plan, problem: Problem, parts: list[tuple]) -> list:
        self._transport.connect(plan)
        return [run_here(program(plan, problem, self.rank, self._transport, *parts[0]))]


class AllRanks(_Strategy):
    """All n ranks of a strategy in this process, on whole sequences: for checks, examples and a single GPU.

    Takes the place of a `ContextParallel`; arguments and errors as there.
    """

    def __init__(self, n: int, strategy: str = "ring", layout: str | None = None, **options: object) -> None:
        super().__init__(strategy, layout, n, options)

    def split(self, x: Tensor) -> list[Tensor]:
        return [shard(x, self.layout, chunk, self.n) for chunk in self.chunks]

    def join(self, parts: list[Tensor]) -> Tensor:
        by_chunk = dict(zip(self.chunks, parts, strict=True))
        return unshard([by_chunk[chunk] for chunk in range(self.n)], self.layout)

    def run(self, program: Callable[..., Program], plan: Plan, problem: Problem, parts: list[tuple]) -> list:
        post: dict = defaultdict(list)
        programs = [program(plan, problem, r, LocalTransport(r, post), *part) for r, part in enumerate(parts)]
        return run_all(programs, plan)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel | AllRanks,
    *,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: Kernel | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v over the whole sequence, for this rank's tokens. Differentiable in q, k and v.

    Args:
        q: [s, b, heads, d], this rank's tokens in the order of `cp.positions` (all tokens for `AllRanks`).
        k, v: [s, b, kv_heads, d], same tokens and dtype; kv_heads divides heads.
        cp: the context group.
        causal: each token sees itself and those before it; otherwise all.
        scale: default 1 / sqrt(d).
        return_lse: also return the log-sum-exp of the scaled scores, [s, b, heads] in float32 (not differentiable).
        kernel: block attention to use; default: what serves the device and dtype.

    Returns:
        [s, b, heads, d] in q's dtype, or that and the log-sum-exp.

    Raises:
        UsageError: shapes, dtypes, heads or a sequence length that do not go together.
    """
    _check(q, k, v)
    check_heads(cp.plan(causal=causal, backward=False), q.shape[2], k.shape[2])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, lse = _Attention.apply(q, k, v, cp, causal, scale, kernel or kernel_for(q.device, q.dtype))
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise UsageError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: need q [s, b, heads, d] and "
            "k, v [s, b, kv_heads, d]"
        )
    if q.shape[2] % k.shape[2]:
        raise UsageError(f"{k.shape[2]} key/value heads do not divide {q.shape[2]} query heads")
    if not q.dtype == k.dtype == v.dtype:
        raise UsageError(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: need one dtype")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cp, causal, scale, kernel):
        parts = list(zip(cp.split(q), cp.split(k), cp.split(v), strict=True))
        ctx.cp, ctx.causal = cp, causal
        ctx.problem = Problem(len(parts[0][0]) * cp.n, k.shape[2], kernel, scale)
        plan = cp.plan(causal=causal, backward=False)
        outs, lses, *kept = zip(*cp.run(_forward, plan, ctx.problem, parts), strict=True)
        ctx.save_for_backward(*outs, *(x for of_ranks in kept for x in of_ranks))
        out, lse = cp.join(outs), cp.join(lses)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        douts = ctx.cp.split(dout)
        ranks, saved = len(douts), ctx.saved_tensors
        parts = list(zip(douts, *(saved[i : i + ranks] for i in range(0, len(saved), ranks)), strict=True))
        plan = ctx.cp.plan(causal=ctx.causal, backward=True)
        grads = zip(*ctx.cp.run(_backward, plan, ctx.problem, parts), strict=True)
        return *(ctx.cp.join(x) for x in grads), None, None, None, None


def _forward(
    plan: Plan, problem: Problem, rank: int, transport: Transport, q: Tensor, k: Tensor, v: Tensor
) -> Program[tuple[Tensor, ...]]:
    """A rank's output and log-sum-exp, and what its backward pass needs besides the output."""
    group = HeadGroup(plan, rank, problem.length, transport)
    q, k, v = yield from group.to_heads(q, k, v)
    s, b, heads, d = q.shape
    folded = q.reshape(s, b * k.shape[2], heads // k.shape[2], d).contiguous()
    kv = torch.stack((k, v)).view(2, s, b * k.shape[2], d)
    executor = Executor(plan, group.context_rank, problem, group.context, {T.Q: (folded,), T.KV: (kv,)})
    out, lse = (yield from executor.run())[T.O]
    ours = yield from group.to_chunks(out.to(q.dtype).view(q.shape), lse.view(s, b, heads))
    return *ours, folded, kv, lse


def _backward(
    plan: Plan,
    problem: Problem,
    rank: int,
    transport: Transport,
    dout: Tensor,
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
) -> Program[Iterable[Tensor]]:
    """A rank's gradients of queries, keys and values; `q`, `kv` and `lse` are what `_forward` kept."""
    group = HeadGroup(plan, rank, problem.length, transport)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dout, delta = yield from group.to_heads(dout, delta)
    inputs = {T.QDO: (q, dout.reshape(q.shape).contiguous(), lse, delta.reshape(lse.shape)), T.KV: (kv,)}
    ends = yield from Executor(plan, group.context_rank, problem, group.context, inputs).run()
    s, b = dout.shape[:2]
    dq = ends[T.DQ][0].to(q.dtype).view(dout.shape)
    dkv = ends[T.DKV][0].view(2, s, b, -1, q.shape[-1])
    if plan.heads <= problem.kv_heads:
        return (yield from group.to_chunks(dq, *dkv.to(q.dtype)))
    dq, *dkv = yield from group.to_chunks(dq, *dkv)  # of replicas: each is a partial sum
    dk, dv = (x.unflatten(2, (problem.kv_heads, -1)).sum(3).to(q.dtype) for x in dkv)
    return dq, dk, dv
