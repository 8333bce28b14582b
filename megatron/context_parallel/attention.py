"""Exact attention over a sequence that the ranks of a context group share."""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UsageError
from .executor import Executor, Problem, Value
from .kernels import Kernel, kernel_for
from .layout import positions, shard, unshard
from .plan.ir import Plan, T
from .plan.verify import verify
from .strategies import find_strategy
from .transport import LocalTransport, TorchTransport, run_all, run_here

VERIFY_UP_TO = 64  # ranks; beyond, the symbolic run takes longer than a launch should


class _Strategy:
    """A strategy, its layout and options, and its plans for n ranks, each verified when first made."""

    def __init__(self, strategy: str, layout: str | None, n: int, options: dict[str, object]) -> None:
        self.strategy, self.n, self.options = find_strategy(strategy), n, options
        self.layout = layout or self.strategy.layouts[0]
        self._plans: dict[tuple[bool, bool], Plan] = {}
        self.plan(causal=True, backward=False)

    def plan(self, *, causal: bool, backward: bool) -> Plan:
        """The plan of one pass.

        Raises:
            UsageError: a layout the strategy does not work with.
        """
        if (causal, backward) not in self._plans:
            plan = self.strategy.plan(self.n, layout=self.layout, causal=causal, backward=backward, **self.options)
            if self.n <= VERIFY_UP_TO:
                verify(plan)
            self._plans[causal, backward] = plan
        return self._plans[causal, backward]


class ContextParallel(_Strategy):
    """A context group and how it computes attention. Make one per group and keep it: it holds communicators.

    Args:
        strategy: `--cp-strategy`, a key of `strategies.STRATEGIES`.
        layout: `--cp-layout`; default: the strategy's own.
        group: the ranks that share a sequence; default: the world.
        options: those of the strategy.

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

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's tokens of a full sequence: [..., length, ...] to [..., length / n, ...] along `dim`."""
        return shard(x, self.layout, self.rank, self.n, dim)

    def positions(self, length: int) -> Tensor:
        """Positions of this rank's tokens, int64 [length / n], in local order."""
        return positions(self.layout, self.rank, self.n, length)

    def run(self, plan: Plan, inputs: dict[T, Value], kernel: Kernel, scale: float) -> dict[T, Value]:
        self._transport.connect(plan)
        problem = Problem(inputs[T.KV][0].shape[1] * self.n, kernel, scale)
        return run_here(Executor(plan, self.rank, problem, self._transport, inputs).run())


class AllRanks(_Strategy):
    """All n ranks of a strategy in this process, on whole sequences: for checks, examples and a single GPU.

    Takes the place of a `ContextParallel`; arguments and errors as there.
    """

    def __init__(self, n: int, strategy: str = "ring", layout: str | None = None, **options: object) -> None:
        super().__init__(strategy, layout, n, options)

    def run(self, plan: Plan, inputs: dict[T, Value], kernel: Kernel, scale: float) -> dict[T, Value]:
        post: dict = defaultdict(list)
        problem = Problem(inputs[T.KV][0].shape[1], kernel, scale)
        programs = []
        for r in range(self.n):
            mine = {t: tuple(shard(x, self.layout, r, self.n, _rows(t)) for x in value) for t, value in inputs.items()}
            programs.append(Executor(plan, r, problem, LocalTransport(r, post), mine).run())
        results = run_all(programs, plan)
        return {
            t: tuple(
                unshard(list(parts), self.layout, _rows(t)) for parts in zip(*(r[t] for r in results), strict=True)
            )
            for t in plan.ends
        }


def _rows(tensor: T) -> int:
    return 1 if tensor in (T.KV, T.DKV) else 0


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
        UsageError: shapes, dtypes or a sequence length that do not go together.
    """
    _check(q, k, v)
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
        s, b, heads, d = q.shape
        folded = q.reshape(s, b * k.shape[2], heads // k.shape[2], d).contiguous()
        kv = torch.stack((k, v)).view(2, s, b * k.shape[2], d)
        plan = cp.plan(causal=causal, backward=False)
        out, lse = cp.run(plan, {T.Q: (folded,), T.KV: (kv,)}, kernel, scale)[T.O]
        out = out.to(q.dtype)
        ctx.save_for_backward(folded, kv, out, lse)
        ctx.cp, ctx.causal, ctx.scale, ctx.kernel = cp, causal, scale, kernel
        out, lse = out.view(q.shape), lse.view(s, b, heads)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, kv, out, lse = ctx.saved_tensors
        s, b = dout.shape[:2]
        folded = dout.reshape(q.shape).contiguous()
        delta = (folded.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        plan = ctx.cp.plan(causal=ctx.causal, backward=True)
        ends = ctx.cp.run(plan, {T.QDO: (q, folded, lse, delta), T.KV: (kv,)}, ctx.kernel, ctx.scale)
        dq = ends[T.DQ][0].to(q.dtype).view(dout.shape)
        dk, dv = ends[T.DKV][0].to(kv.dtype).view(2, s, b, -1, q.shape[-1])
        return dq, dk, dv, None, None, None, None
