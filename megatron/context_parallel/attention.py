"""Exact attention over a sequence that the ranks of a context group share."""

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import Blocks
from .errors import UsageError
from .executor import Executor, Problem
from .heads import HeadGroup, check_heads
from .kernels import Kernel
from .kernels.choose import kernel_for
from .layout import positions, shard, unshard
from .mask import Documents, Mask, Pairs
from .plan.ir import Plan, T
from .plan.verify import verify
from .strategies import find_strategy
from .transport import LocalTransport, Program, TorchTransport, Transport, run_all, run_here

ALL_RANKS_UP_TO = 64  # beyond, what goes through the steps of all ranks (verifying, plans by document) is left out
REMEMBERED = 32  # plans and blocks kept; those of packed documents change with each batch


class _Strategy:
    """A strategy, its layout and options, and its plans for n ranks.

    Each is made once, and verified then unless documents shape it.
    """

    def __init__(self, strategy: str, layout: str | None, n: int, options: dict[str, object]) -> None:
        self.strategy, self.n, self.options = find_strategy(strategy), n, options
        self.layout = layout or self.strategy.layouts[0]
        self._recent: OrderedDict[tuple, object] = OrderedDict()
        plan = self._make(None, backward=False, checked=True)
        self._remember(("plan", plan.sees, False), lambda: plan)
        self.steps_on = plan.n  # ranks that run the steps of a plan together
        self.chunks = [plan.chunk_of(r) for r in range(n)]  # of each rank

    def plan(self, mask: Mask, length: int, *, backward: bool) -> Plan:
        """The plan of one pass over `length` tokens. What the mask empties does not travel if the strategy can tell.

        Raises:
            UsageError: a layout the strategy does not work with.
        """
        if self.steps_on > ALL_RANKS_UP_TO:
            mask = Mask(mask.causal, mask.window)  # plans for the documents of each batch would take too long to make
        sees, checked = mask.pairs(self.layout, self.steps_on, length), mask.documents is None
        return self._remember(("plan", sees, backward), lambda: self._make(sees, backward, checked))

    def _make(self, sees: Pairs | None, backward: bool, checked: bool) -> Plan:
        plan = self.strategy.plan(self.n, layout=self.layout, sees=sees, backward=backward, **self.options)
        if checked and plan.n <= ALL_RANKS_UP_TO:
            verify(plan)
        return plan

    def blocks(self, mask: Mask, length: int, kernel: Kernel) -> Blocks:
        """The blocks of `mask` over `length` tokens, the same object for each layer of a model."""
        key = "blocks", mask, length, kernel
        return self._remember(key, lambda: Blocks(mask, self.layout, self.steps_on, length, kernel))

    def _remember(self, key: tuple, make: Callable[[], object]) -> object:
        if key not in self._recent:
            self._recent[key] = make()
        self._recent.move_to_end(key)
        while len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)
        return self._recent[key]


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

    def length(self, x: Tensor) -> int:
        """Tokens of the whole sequence of which this rank has `x`."""
        return len(x) * self.n

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

    def length(self, x: Tensor) -> int:
        return len(x)

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
    window: tuple[int, int] = (-1, -1),
    documents: Documents | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: Kernel | None = None,
    kept: deque | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v over the whole sequence, for this rank's tokens. Differentiable in q, k and v.

    Args:
        q: [s, b, heads, d], this rank's tokens in the order of `cp.positions` (all tokens for `AllRanks`).
        k, v: [s, b, kv_heads, d], same tokens and dtype; kv_heads divides heads.
        cp: the context group.
        causal: each token sees itself and those before it; otherwise all.
        window: how many tokens before and after itself it sees at most; -1 for all.
        documents: of all tokens of the sequence, the same object for each layer; a token sees only its own, and one of
            none gets 0 and a log-sum-exp of -inf.
        scale: default 1 / sqrt(d).
        return_lse: also return the log-sum-exp of the scaled scores, [s, b, heads] in float32 (not differentiable).
        kernel: block attention to use; default: what serves the device and dtype.
        kept: for recomputation. A call without gradients adds what it computed; one with gradients takes the oldest,
            which must be that of the same q, k and v, computes nothing, and sends at most what swaps heads.

    Returns:
        [s, b, heads, d] in q's dtype, or that and the log-sum-exp.

    Raises:
        UsageError: shapes, dtypes, heads or a sequence length that do not go together.
    """
    _check(q, k, v)
    mask, length = Mask(causal, window, documents), cp.length(q)
    if documents is not None and documents.shape not in ((1, length), (q.shape[1], length)):
        raise UsageError(
            f"documents of {list(documents.shape)} samples and tokens: need [1 or {q.shape[1]}, {length}], the whole "
            "sequence on every rank"
        )
    plan = cp.plan(mask, length, backward=False)
    check_heads(plan, q.shape[2], k.shape[2])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    kernel = kernel or kernel_for(q.device, q.dtype, q.shape[-1])
    problem = Problem(cp.blocks(mask, length, kernel), k.shape[2], kernel, scale)
    again = kept.popleft() if kept and torch.is_grad_enabled() else None
    out, lse = _Attention.apply(q, k, v, cp, plan, problem, again, None if torch.is_grad_enabled() else kept)
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
    def forward(ctx, q, k, v, cp, plan, problem, again, keep):
        parts = list(zip(cp.split(q), cp.split(k), cp.split(v), strict=True))
        ctx.cp, ctx.problem = cp, problem
        if again:
            parts = [(*part, *results) for part, results in zip(parts, again, strict=True)]
        outs, lses, *saved = zip(*cp.run(_recall if again else _forward, plan, problem, parts), strict=True)
        if keep is not None:
            keep.append([*zip(outs, lses, saved[-1], strict=True)])
        ctx.save_for_backward(*outs, *(x for of_ranks in saved for x in of_ranks))
        out, lse = cp.join(outs), cp.join(lses)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        douts = ctx.cp.split(dout)
        ranks, saved = len(douts), ctx.saved_tensors
        parts = list(zip(douts, *(saved[i : i + ranks] for i in range(0, len(saved), ranks)), strict=True))
        blocks = ctx.problem.blocks
        plan = ctx.cp.plan(blocks.mask, blocks.length, backward=True)
        grads = zip(*ctx.cp.run(_backward, plan, ctx.problem, parts), strict=True)
        return *(ctx.cp.join(x) for x in grads), None, None, None, None, None


def _forward(
    plan: Plan, problem: Problem, rank: int, transport: Transport, q: Tensor, k: Tensor, v: Tensor
) -> Program[tuple[Tensor, ...]]:
    """A rank's output and log-sum-exp, and what its backward pass needs besides the output."""
    group = HeadGroup(plan, rank, problem.blocks.length, transport)
    b, dtype = q.shape[1], q.dtype
    q, k, v = yield from _folded(group, q, k, v)
    executor = Executor(plan, group.context_rank, problem, group.context, {T.Q: (q,), T.KV: (k, v)})
    out, lse = (yield from executor.run())[T.O]
    s, d = q.shape[0], q.shape[-1]
    ours = yield from group.to_chunks(out.to(dtype).view(s, b, -1, d), lse.view(s, b, -1))
    return *ours, q, k, v, lse


def _recall(
    plan: Plan,
    problem: Problem,
    rank: int,
    transport: Transport,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *results: Tensor,
) -> Program[tuple[Tensor, ...]]:
    """What `_forward` returned, from inputs computed again and its output and log-sum-exps."""
    q, k, v = yield from _folded(HeadGroup(plan, rank, problem.blocks.length, transport), q, k, v)
    out, lse, inner_lse = results
    return out, lse, q, k, v, inner_lse


def _folded(group: HeadGroup, q: Tensor, k: Tensor, v: Tensor) -> Program[tuple[Tensor, ...]]:
    """Queries, keys and values of this rank's heads, as the executor takes them."""
    q, k, v = yield from group.to_heads(q, k, v)
    s, b, heads, d = q.shape
    q = q.reshape(s, b * k.shape[2], heads // k.shape[2], d).contiguous()
    return q, *(x.reshape(s, b * x.shape[2], d).contiguous() for x in (k, v))


def _backward(
    plan: Plan,
    problem: Problem,
    rank: int,
    transport: Transport,
    dout: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
) -> Program[Iterable[Tensor]]:
    """A rank's gradients of queries, keys and values; `q`, `k`, `v` and `lse` are what `_forward` kept."""
    group = HeadGroup(plan, rank, problem.blocks.length, transport)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dout, delta = yield from group.to_heads(dout, delta)
    inputs = {T.QDO: (q, dout.reshape(q.shape).contiguous(), lse, delta.reshape(lse.shape)), T.KV: (k, v)}
    ends = yield from Executor(plan, group.context_rank, problem, group.context, inputs).run()
    s, b = dout.shape[:2]
    dq = ends[T.DQ][0].to(q.dtype).view(dout.shape)
    dkv = (x.view(s, b, -1, q.shape[-1]) for x in ends[T.DKV])
    if plan.heads <= problem.kv_heads:
        return (yield from group.to_chunks(dq, *(x.to(q.dtype) for x in dkv)))
    dq, *dkv = yield from group.to_chunks(dq, *dkv)  # of replicas: each is a partial sum
    dk, dv = (x.unflatten(2, (problem.kv_heads, -1)).sum(3).to(q.dtype) for x in dkv)
    return dq, dk, dv
