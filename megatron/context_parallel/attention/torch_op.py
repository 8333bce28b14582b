"""`torch.ops.context_parallel.attention`: attention and its gradients as operators that PyTorch does not trace into.
So torch.compile has no graph break at them, and a selective-checkpoint policy can save their results.

They take objects as integers (`tokens/handles.py`). If heads are swapped in one round, attention also returns the
swapped queries, keys, values and log-sum-exp of each rank of the process, for the backward pass. Otherwise the backward
pass uses the inputs.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, library

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import Kernel, Scores
from megatron.context_parallel.patches.torch_dispatcher import below_autograd
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.runtime import passes
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.runtime.comm.transport import Program
from megatron.context_parallel.runtime.executor import Problem
from megatron.context_parallel.tokens.documents import Documents, placement_of
from megatron.context_parallel.tokens.handles import HandleOf, object_of
from megatron.context_parallel.tokens.mask import Mask

from .context import AllRanks, ContextParallel
from .inputs import refuse_export, refuse_transforms
from .plans import Lengths

NAME = "context_parallel::attention"
GRADIENTS = "context_parallel::attention_backward"
TensorList = list[Tensor]  # for each rank of the process
SymbolicInt = Annotated[int, "SymInt"]  # another value does not recompile the graph


class OpArgs(NamedTuple):
    """The common arguments of both operators, besides tensors and sizes."""

    cp: int
    causal: bool
    window: Sequence[int]
    documents: SymbolicInt
    scale: float
    softcap: float
    kernel: int

    def objects(self) -> tuple[ContextParallel | AllRanks, Documents | None, HandleOf | None]:
        return object_of(self.cp, "cp"), object_of(self.documents, "documents"), object_of(self.kernel, "kernel")


_SCHEMA_TYPES = {int: "int", bool: "bool", float: "float", Sequence[int]: "int[2]", SymbolicInt: "SymInt"}
ARGS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in OpArgs.__annotations__.items())

# torch.compile keeps them out of its CUDA graphs: the host decides in each call what is sent and which blocks run.
_TAGS = (torch.Tag.cudagraph_unsafe,)
library.define(
    NAME,
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, int kept, {ARGS}) -> (Tensor out, Tensor lse, Tensor[] swapped)",
    tags=_TAGS,
)
library.define(
    GRADIENTS,
    f"(Tensor dout, Tensor out, Tensor[] seen, Tensor? sinks, SymInt kv_heads, {ARGS}) -> Tensor[]",
    tags=_TAGS,
)
attention = torch.ops.context_parallel.attention.default
_gradients = torch.ops.context_parallel.attention_backward.default


class _Sizes(NamedTuple):
    """The direction of a pass, the tokens of the whole sequence, and the heads of the model."""

    backward: bool
    lengths: Lengths
    heads: int
    kv_heads: int


class _Call(NamedTuple):
    """The plan of a pass, and how the ranks of a process run it."""

    cp: ContextParallel | AllRanks
    plan: Plan
    problem: Problem

    def run(self, program: Callable[..., Program], *inputs: Iterable) -> list[TensorList]:
        """Runs `program` on each rank with its part of each input. Returns each result as parts of the ranks."""
        parts = [*zip(*inputs, strict=True)]
        with torch.cuda.device_of(parts[0][-1]):  # Triton launches on the current device, wherever its tensors are
            return _by_tensor(self.cp.run(program, self.plan, self.problem, parts))


def _call(how: OpArgs, sizes: _Sizes, q: Tensor, v: Tensor) -> _Call:
    cp, documents, given = how.objects()
    if given:
        kernel: Kernel = given.value
    else:
        kernel = kernel_for(q.device, q.dtype, q.shape[-1], value_dim=v.shape[-1], softcap=how.softcap)
    window = how.window[0], how.window[1]  # PyTorch passes a list
    _, lengths, heads, kv_heads = sizes

    def make() -> tuple[Plan, Problem]:
        mask = Mask(how.causal, window, documents)
        placement = None if sizes.backward else placement_of(documents)
        compared = cp.compare_placements(placement) if placement else None
        blocks = cp.plans.blocks(mask, lengths, kernel)
        plan = cp.plans.of(mask, lengths, heads, kv_heads, backward=sizes.backward)
        sets = cp.plans.row_sets(plan, blocks)
        ranges = cp.plans.ranges(plan, mask, lengths[0], kernel)
        if compared:
            compared()  # last: a GPU computes what came before while the host plans
        return plan, Problem(blocks, kv_heads, kernel, Scores(how.scale, how.softcap), sets, ranges)

    key = "call", how.causal, window, how.documents, how.scale, how.softcap, kernel, sizes
    plan, problem = cp.plans.cached(key, make)
    return _Call(cp, plan, problem)


def _by_tensor(by_rank: Iterable[Iterable[Tensor]]) -> list[TensorList]:
    """Regroups the tensors of each rank: for each tensor, the parts of the ranks."""
    return [[*parts] for parts in zip(*by_rank, strict=True)]


def _joined(parts: TensorList) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@library.impl(NAME, "default")
def _attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kept: int, *args: Any) -> tuple:
    how = OpArgs(*args)
    cp, documents, _ = how.objects()
    lengths = cp.length(q), cp.length(k)
    _check_documents(documents, cp, q.shape[1], *lengths)
    placement = placement_of(documents)
    sizes = _Sizes(backward=False, lengths=lengths, heads=q.shape[2], kv_heads=k.shape[2])
    call = _call(how, sizes, q, v)
    keeps = call.plan.keeps_swapped
    parts = [cp.split(x, placement) for x in (q, k, v)]
    if kept:
        out, lse, *swapped_lse = object_of(kept, "kept").value
        swapped = call.run(passes.swap, *parts) if keeps else []
        return out, lse, [*map(_joined, swapped), *swapped_lse]
    outs, lses, *seen = call.run(passes.forward, repeat(sinks, len(parts[0])), *parts)
    swapped = seen if keeps else []
    return cp.join(outs, placement), cp.join(lses, placement), [*map(_joined, swapped)]


@library.register_fake(NAME)
def _shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kept: int, cp: int, *_: Any) -> tuple:
    refuse_export()
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=wide)
    ranks = object_of(cp, "cp")
    if not ranks.keeps_swapped:
        return out, lse, []
    size = ranks.head_parallel_size
    kv_heads = max(1, k.shape[2] // size)  # per rank; replicas if there are more ranks than heads
    batch = q.shape[1] * kv_heads
    group = q.shape[2] // size // kv_heads
    swapped = [q.new_empty(len(q) * size, batch, group, q.shape[3])]
    swapped += [x.new_empty(len(x) * size, batch, x.shape[3]) for x in (k, v)]
    return out, lse, [*swapped, q.new_empty(len(q) * size, batch, group, dtype=wide)]


@library.impl(GRADIENTS, "default")
def _attention_backward(
    dout: Tensor, out: Tensor, seen: list[Tensor], sinks: Tensor | None, kv_heads: int, *args: Any
) -> list[Tensor]:
    how = OpArgs(*args)
    q, k, v = seen[:3]
    cp, documents, _ = how.objects()
    placement = placement_of(documents)
    lengths = cp.length(dout), cp.length(k) // cp.swapped_rows
    sizes = _Sizes(backward=True, lengths=lengths, heads=out.shape[2], kv_heads=kv_heads)
    call = _call(how, sizes, q, v)
    parts = [cp.split(x, placement) for x in (dout, out)]
    ranks = len(parts[0])
    keeps = call.plan.keeps_swapped
    inputs = [[*x.chunk(ranks)] if keeps else cp.split(x, placement) for x in seen]
    if call.plan.head_parallel_size == 1:
        inputs = _by_tensor(map(passes.fold_heads, *inputs))
    dsinks, *grads = call.run(passes.backward, repeat(sinks, ranks), *parts, *inputs)
    results = [cp.join(of_ranks, placement) for of_ranks in grads]
    if sinks is not None:
        results.append(cp.sum_over_ranks(dsinks, sinks.dtype))
    return results


@library.register_fake(GRADIENTS)
def _shapes_of_gradients(
    dout: Tensor, out: Tensor, seen: list[Tensor], sinks: Tensor | None, kv_heads: int, cp: int, *_: Any
) -> list[Tensor]:
    q, k, v = seen[:3]
    t = len(k) // object_of(cp, "cp").swapped_rows
    grads = [q.new_empty(*out.shape[:3], q.shape[-1])]
    grads += [x.new_empty(t, out.shape[1], kv_heads, x.shape[-1]) for x in (k, v)]
    if sinks is not None:
        grads.append(torch.empty_like(sinks))
    return grads


class _Attention(torch.autograd.Function):
    """Equivalent to PyTorch's `register_autograd`, in a third of its time."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kept: int, *args: Any
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            out, lse, swapped = attention(q, k, v, sinks, kept, *args)
        ctx.mark_non_differentiable(lse, *swapped)
        ctx.set_materialize_grads(False)  # otherwise gradients of unused outputs would be zeros
        ctx.save_for_backward(out, sinks, *(swapped or (q, k, v, lse)))
        ctx.how = OpArgs(*args)
        ctx.kv_heads = k.shape[2]
        ctx.layer = recorder.position.layer
        if isinstance(ctx.how.documents, int):  # torch.compile gives a SymInt where they change
            ctx.alive = ctx.how.objects()
        return out, lse, *swapped

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        out, sinks, *seen = ctx.saved_tensors
        recorder.at_layer(ctx.layer)
        dout = torch.zeros_like(out) if dout is None else dout
        refuse_transforms(dout)
        sinks = sinks if ctx.needs_input_grad[3] else None
        # A second differentiation raises an error.
        with nullcontext() if torch.is_grad_enabled() else below_autograd():
            dq, dk, dv, *dsinks = _gradients(dout, out, seen, sinks, ctx.kv_heads, *ctx.how)
        return dq, dk, dv, dsinks[0] if dsinks else None, None, *[None] * len(ctx.how)


@library.impl(NAME, "Autograd")
def _differentiable(*args: Any) -> tuple:
    refuse_transforms(*args[:4])
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:4]):
        out, lse, *swapped = _Attention.apply(*args)
        return out, lse, swapped
    with below_autograd():
        return attention(*args)


def _refuse(ctx: Any, *_: Tensor | None) -> None:
    raise UsageError(
        "second derivatives: context_parallel_attention does not support them; differentiate once, "
        "without create_graph=True"
    )


library.register_autograd(GRADIENTS, _refuse)


def _refuse_vmap(*_: Any) -> None:
    raise UsageError("vmap: context_parallel_attention does not support it; give the batch as dimension b")


for _name in (NAME, GRADIENTS):
    library.register_vmap(_name, _refuse_vmap)


def _without_autocast(op: Callable, device: str) -> Callable:
    """`context_parallel_attention` has already cast the inputs, and kernels choose their own compute dtypes."""

    def call(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return op(*args)

    return call


for _key, _device in ("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda"):
    library.impl(NAME, _key, func=_without_autocast(attention, _device))
    library.impl(GRADIENTS, _key, func=_without_autocast(_gradients, _device))


def _check_documents(
    documents: Documents | None, cp: ContextParallel | AllRanks, batch: int, q_length: int, kv_length: int
) -> None:
    if documents is None:
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "documents: a CUDA graph would keep those of the batch that it captures; leave attention out of the graph"
        )
    if q_length != kv_length:
        raise UsageError(f"documents with {q_length} queries and {kv_length} keys: need queries and keys of one length")
    samples, length = documents.shape
    if length != q_length or (samples != batch and not documents.shared):
        shared = "" if samples != 1 or batch == 1 else ", or Documents(ids) of int [length], common to all samples"
        raise UsageError(
            f"documents of {[samples, length]} samples and tokens: need {[batch, q_length]}, the whole sequence on "
            f"every rank{shared}"
        )
    chunks = cp.n // cp.head_parallel_size
    if documents.placement and documents.placement.n != chunks:
        raise UsageError(
            f"documents placed on {documents.placement.n} chunks: the context group has {chunks}, which is "
            f"{cp.n} ranks / head-parallel size {cp.head_parallel_size}; place them on {chunks}"
        )
