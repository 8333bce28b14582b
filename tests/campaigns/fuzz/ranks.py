"""Runs a fuzzed case: all ranks in this process, or on gloo ranks that started once and wait for cases."""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel import AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.attention.plans import Plans
from megatron.context_parallel.kernels.interface import Scores
from megatron.context_parallel.kernels.masks import KeyRanges, Piece, PieceMask
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.plan.ir import Plan, PlanError
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.strategies import Choice
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.place_documents import Costs, place
from megatron.context_parallel.tokens.placement import Placement
from tests.campaigns.fuzz.case import MUTATION, ON_RANKS, Call, Case
from tests.campaigns.fuzz.oracle import end_to_end, in_samples, inputs, placed_positions, positions, unseen
from tests.campaigns.plan_mutations import mutate

Results = list[list[Tensor | None]]  # by call: out, lse, dq, dk, dv and, with sinks, dsinks; None: of a frozen input
ORDERS = {"sbhd": (0, 1, 2, 3), "bshd": (1, 0, 2, 3), "bhsd": (1, 2, 0, 3)}  # the dimensions of [s, b, heads, d]
GARBAGE = (float("nan"), float("inf"), 3e38, 0.0)
PATIENCE = 60.0  # seconds a case on ranks may take: some hundred times what it does


class Owned(NamedTuple):
    """The chunk of a rank in the layout, and of n equal parts of a batch's own placement."""

    chunk: int
    placed_chunk: int


class Failure(Exception):
    """The package violated a requirement; the text is one line."""


def run(case: Case, pool: "Pool") -> list[Results]:
    """Results over whole sequences, of each group of ranks.

    Raises:
        UsageError: the package refused the case.
        Failure: it hung, raised something else, or put tokens in a wrong place.
    """
    case = replace(case, calls=_with_slices(case.calls))
    if case.kind == ON_RANKS:
        of_ranks = pool(case)
        return [_join(case, of_ranks[group :: case.groups]) for group in range(case.groups)]
    try:
        ranks = AllRanks(case.n, case.strategy, case.layout, **case.options)
        if case.kind == MUTATION:
            ranks.plans = _MutatedPlans(case.calls[0].seed, ranks.choice, case.n)
        found = perform(case, ranks, lambda x, call, documents: end_to_end(x) if call.placement else x)
        return [[_in_samples(call, results) for call, results in zip(case.calls, found, strict=True)]]
    except UsageError:
        raise
    except _Found:
        return []
    except Exception as error:
        raise Failure(_line(error)) from error


class _Found(Exception):
    """The verifier refused a changed plan, as it may."""


class _MutatedPlans(Plans):
    """Random changes of plans. A changed plan that the verifier accepts must be right."""

    def __init__(self, seed: int, choice: Choice, n: int) -> None:
        super().__init__(choice, n)
        self.random = Random(seed)

    def of(self, *args: object, backward: bool) -> Plan:
        plan = mutate(super().of(*args, backward=backward), self.random)
        try:
            verify(plan)
        except PlanError as error:
            raise _Found from error
        return plan


class _WholeBlocks(Reference):
    """Takes a block in one piece."""

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        return [Piece(slice(0, block.first.shape[1]), slice(0, keys), block)]


class _OnDevice(Reference):
    """Its masks are on the device of the queries."""

    def _scores(self, q: Tensor, k: Tensor, mask: PieceMask, how: Scores) -> tuple[Tensor, Tensor | float]:
        on_device = KeyRanges(*(x.to(q.device) for x in mask)) if isinstance(mask, KeyRanges) else mask
        return super()._scores(q, k, on_device, how)


Own = Callable[[Tensor, Call, Documents | None], Tensor]


def perform(case: Case, cp: AllRanks | ContextParallel, own: Own) -> Results:
    """All calls of a case, all forward passes first; `own` takes a rank's tokens of whole tensors."""
    documents: dict[str, Documents] = {}
    kept: deque = deque()  # one for all calls, like that of a layer with several batches in a pipeline
    calls = [_prepared(call, documents, own) for call in case.calls]
    for call, (leaves, _, _, how) in zip(case.calls, calls, strict=True):
        if call.recompute:
            with torch.no_grad(), _autocast(call):
                context_parallel_attention(*leaves[:3], cp, **how, kept=kept)
    passes = []
    for call, (leaves, dout, before, how) in zip(case.calls, calls, strict=True):
        again = {"kept": kept} if call.recompute else {}
        with _autocast(call):
            out, lse = context_parallel_attention(*leaves[:3], cp, return_lse=True, **how, **again)
        passes.append((out, lse, leaves, dout, before))
    results: Results = [[] for _ in passes]
    order = range(len(passes)) if case.in_turn else reversed(range(len(passes)))
    for i in order:
        out, lse, leaves, dout, before = passes[i]
        needed = [x for x in leaves if x.requires_grad]
        grads = iter(torch.autograd.grad(out, needed, dout))
        found = [out.detach(), lse, *(next(grads) if x.requires_grad else None for x in leaves)]
        results[i] = [_from_layout(x, case.calls[i]) for x in found]
        assert out.dtype == dout.dtype, f"an output of {out.dtype} for inputs of {dout.dtype}"
        assert lse.dtype == torch.promote_types(dout.dtype, torch.float32), f"a log-sum-exp of {lse.dtype}"
        assert all(map(_same, (*leaves, dout), before)), "the inputs were changed"
    return results


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"  # a pretended one, of processes of their own


def _autocast(call: Call) -> torch.autocast:
    dtype = getattr(torch, call.dtype) if call.autocast else torch.bfloat16
    return torch.autocast(_device(), dtype, enabled=call.autocast)


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5))


def _from_layout(x: Tensor | None, call: Call) -> Tensor | None:
    """A result in the dimension order of the call, as [s, b, ...]."""
    if x is None or x.dim() == 1:
        return x
    order = ORDERS[call.tensor_layout][: x.dim()]
    return x.permute([order.index(i) for i in range(x.dim())])


def _prepared(call: Call, documents: dict[str, Documents], own: Own) -> tuple[list[Tensor], Tensor, list[Tensor], dict]:
    """A rank's leaves, its output gradient, copies of both, and the other arguments of a call."""
    *tensors, sinks = inputs(call)
    how = _how(call, documents, sinks)
    if call.garbage and _device() == "cpu":  # the exact kernel would compute with it
        _put_garbage(call, tensors[:3])
    *parts, dout = [own(x, call, how.get("documents")).to(_device()) for x in tensors]
    if call.autocast:
        parts = [x.float() for x in parts]
    if call.expanded:
        parts[1:] = [x[:, :, :1].expand_as(x) for x in parts[1:]]
        dout = dout if call.dout == "gaps" else dout[:1, :1, :1, :1].expand_as(dout)
    *leaves, dout = [_as_given(x, call) for x in (*parts, dout)]
    for name, x in zip("qkv", leaves, strict=True):
        x.requires_grad_(name not in call.frozen)
    leaves += [] if sinks is None else [how["sinks"].requires_grad_()]
    return leaves, dout, [x.detach().clone() for x in (*leaves, dout)], how


def _put_garbage(call: Call, tensors: list[Tensor]) -> None:
    """Overwrites queries that see nothing, and keys and values that nothing sees."""
    queries, keys = unseen(call)
    for x, rows in zip(tensors, (queries, keys, keys), strict=True):
        count = int(rows.sum())
        x[rows] = torch.tensor(GARBAGE, dtype=x.dtype).repeat(count)[:count].view(-1, 1, 1)


def _as_given(x: Tensor, call: Call) -> Tensor:
    """A tensor [s, b, ...] as the call gives it."""
    x = x.permute(ORDERS[call.tensor_layout])
    if call.strided:
        return x.transpose(0, 2).contiguous().transpose(0, 2)
    return x if call.expanded else x.contiguous()


def _how(call: Call, documents: dict[str, Documents], sinks: Tensor | None) -> dict:
    how = {"causal": call.causal, "window": call.window, "scale": call.scale, "tensor_layout": call.tensor_layout}
    if _device() == "cuda":  # kernels for GPUs refuse some calls
        how["kernel"] = _OnDevice()
    elif call.kernel != "default":
        how["kernel"] = Reference() if call.kernel == "reference" else _WholeBlocks()
    if call.documents is not None:
        key = call.documents_as + str((call.documents, call.placement))  # one object for the layers of a batch
        if key not in documents:
            of_call = _documents(call)
            documents[key] = of_call.placed(Placement(call.placement)) if call.placement else of_call
        how["documents"] = documents[key]
    if call.softcap:
        how["softcap"] = call.softcap
    if sinks is not None:
        how["sinks"] = sinks.to(_device())
    return how


def _documents(call: Call) -> Documents:
    shared = len(call.documents) == 1
    samples = call.documents * call.batch if shared and call.documents_as != "ids" else call.documents
    names, counts = [], []
    for sample in samples:
        names.append([name for name, _ in sample])
        counts.append([count for _, count in sample])
    if call.documents_as == "packed":
        return _packed(samples, call.length)
    of_tokens = [torch.tensor(x).repeat_interleave(torch.tensor(c)) for x, c in zip(names, counts, strict=True)]
    if call.documents_as == "ids":
        return Documents(of_tokens[0] if shared else torch.stack(of_tokens))
    ends = torch.zeros(len(counts), call.length, dtype=torch.bool)
    for sample, lengths in zip(ends, counts, strict=True):
        sample[torch.tensor(lengths).cumsum(0) - 1] = True
    return Documents.after(ends)


def _with_slices(calls: list[Call]) -> list[Call]:
    """The calls, with the solver's slices where they ask for them: those of the first layer for all of a batch."""
    slices: dict[str, list] = {}
    placed = []
    for call in calls:
        batch = str((call.documents_as, call.documents, call.placement))
        if isinstance(call.placement, int) and batch not in slices:
            slices[batch] = _solved(call, call.placement)
        placed.append(replace(call, placement=slices.get(batch, call.placement)))
    return placed


def _solved(call: Call, chunks: int) -> list[list[list[int]]]:
    """The solver's slices. Links are free, slow or very slow."""
    costs = Costs(1.0, row_inside=(0.0, 10.0, 1000.0)[call.seed % 3])
    found = place(_documents(call), chunks, costs, call.causal, [call.window])
    return [[[first, first + rows] for first, _, rows in of_chunk.tolist()] for of_chunk in found.of_chunks]


def _in_samples(call: Call, results: list[Tensor]) -> list[Tensor]:
    """Results over whole tensors [s, b, ...], of a batch whose samples lay end to end if it was placed."""
    if not call.placement:
        return results
    return [x if x is None or x.dim() == 1 else in_samples(x, call.batch) for x in results]


def _packed(samples: list[list[list[int]]], length: int) -> Documents:
    """By cu_seqlens; padding follows a document, which is empty where there is none before it."""
    ends, starts, at = [0], [], 0
    runs = [run for sample in samples for run in sample]
    for name, count in runs:
        if name >= 0 or not starts:
            starts.append(at)
            ends.append(ends[-1] + (count if name >= 0 else 0))
        at += count
    padded = torch.tensor([*starts, at]) if any(name < 0 for name, _ in runs) else None
    return Documents.packed(torch.tensor(ends), length, padded, samples=len(samples))


def _join(case: Case, of_ranks: list[tuple[Owned, Results]]) -> Results:
    """Whole sequences from what each rank owns and its results."""
    for chunks in zip(*(owned for owned, _ in of_ranks), strict=True):
        if sorted(chunks) != list(range(case.n)):
            raise Failure(f"the ranks own chunks {chunks}")
    joined = []
    for i, call in enumerate(case.calls):
        per_result = zip(*(results[i] for _, results in of_ranks), strict=True)
        owned = [owned for owned, _ in of_ranks]
        joined.append(_in_samples(call, [_whole(case, call, owned, parts) for parts in per_result]))
    return joined


def _places(case: Case, call: Call, owned: Owned, length: int) -> list[int]:
    """The tokens of a rank, of `length` that all ranks have."""
    if call.placement:
        return placed_positions(call.placement, owned.placed_chunk, case.n)
    return positions(case.layout, owned.chunk, case.n, length)


def _whole(case: Case, call: Call, owned: list[Owned], parts: tuple[Tensor | None, ...]) -> Tensor | None:
    if parts[0] is None:
        return None
    if parts[0].dim() == 1:  # of the sinks: each rank has the sum over its tokens
        return torch.stack(parts).double().sum(0)
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for of_rank, part in zip(owned, parts, strict=True):
        whole[_places(case, call, of_rank, len(whole))] = part
    return whole


class Pool:
    """Processes that start once. A call with a case forms a gloo world of its ranks and runs the case."""

    def __init__(self, size: int) -> None:
        self.size, self.cases = size, 0
        self.directory = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes: list = []

    def start(self) -> None:
        if self.pipes:
            return
        if _device() == "cuda":
            context = multiprocessing.get_context("fork")  # they have what this process pretends
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])  # imported once, not by each process
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(rank, theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self.pipes, self.processes = [], []

    def __call__(self, case: Case) -> list[tuple[Owned, Results]]:
        """What each rank owns and its results; raises as `run` does."""
        self.start()
        self.cases += 1
        store = os.path.join(self.directory.name, f"store{self.cases}")
        world = case.n * case.groups
        for pipe in self.pipes[:world]:
            pipe.send((case, store))
        replies = self._replies(world)
        kinds = [kind for kind, _ in replies]
        if "nothing" in kinds or "died" in kinds:
            self.stop()
        for pipe in self.pipes[:world]:
            pipe.send("all replied")
        if set(kinds) == {"done"}:
            return [result for _, result in replies]
        if set(kinds) == {"refused"}:
            raise UsageError(replies[0][1])
        raise Failure("; ".join(f"rank {r} {kind}{text}" for r, (kind, text) in enumerate(replies) if kind != "done"))

    def _replies(self, n: int) -> list[tuple[str, object]]:
        replies: list[tuple[str, object]] = [("nothing", f" in {PATIENCE:.0f} s")] * n
        missing, until = {self.pipes[r]: r for r in range(n)}, time.monotonic() + PATIENCE
        while missing and (ready := wait(list(missing), max(0.0, until - time.monotonic()))):
            for pipe in ready:
                rank = missing.pop(pipe)
                try:
                    replies[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    replies[rank] = "died", ""
                if replies[rank][0] != "done":
                    until = min(until, time.monotonic() + 5)  # the others may wait for it forever
        return replies


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of torch.distributed
    backend = "gloo"
    if _device() == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    while True:
        try:
            case, store = pipe.recv()
        except EOFError:
            return
        world, timeout = case.n * case.groups, timedelta(seconds=PATIENCE)
        try:
            store = f"file://{store}"
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timeout)
            reply = "done", _on_rank(case)
        except UsageError as error:
            reply = "refused", f": {error}"
        except Exception as error:
            reply = "raised", f" {_line(error)}"
        pipe.send(reply)
        pipe.recv()  # others may still be connecting to this rank
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def _on_rank(case: Case) -> tuple[Owned, Results]:
    groups = [dist.new_group(range(group, case.n * case.groups, case.groups)) for group in range(case.groups)]
    group = groups[dist.get_rank() % case.groups] if case.groups > 1 else None
    cp = ContextParallel(case.strategy, case.layout, group, **case.options)

    owned = Owned(cp.chunk, cp.plans.placed_chunks[cp.rank])

    def own(x: Tensor, call: Call, documents: Documents | None) -> Tensor:
        x = end_to_end(x) if call.placement else x
        places = torch.tensor(_places(case, call, owned, len(x)))
        found = cp.positions(len(x), documents)
        assert torch.equal(found, places), f"positions {found.tolist()} of {owned}"
        return x[places]

    return owned, perform(case, cp, own)


def _line(error: Exception) -> str:
    """The error in one line, with where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__} in {os.path.basename(frame.filename)}:{frame.lineno}: {text}"
