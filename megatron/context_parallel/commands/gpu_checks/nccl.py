"""Compares every strategy on the GPUs of this host, one process each, with all ranks in one process."""

import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.runtime.comm.communicators import group_of_this_rank
from megatron.context_parallel.runtime.comm.torch_works import Work
from megatron.context_parallel.runtime.comm.transport import TorchTransport

from .common import CheckReport, CheckSizes, row_of, said, world_of_one
from .errors import WHAT, compare, with_gradients

CHANNELS = ("first", "second")
BOUND = 1e-4  # for float32: the order of sums differs


def check_nccl(report: CheckReport, sizes: CheckSizes, ranks: int, backend: str = "nccl") -> None:
    """Errors of each strategy, on the worst rank; with fewer than two GPUs, reports that it was skipped."""
    if ranks < 2:
        report.add("nccl", left_out="communication between GPUs: needs two or more GPUs, and this host has one")
        check_calls(report, backend)
        return
    context, pipes = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            store = f"file://{os.path.join(folder, 'store')}"
            processes.append(context.Process(target=_rank, args=(rank, ranks, backend, store, sizes, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        of_ranks = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    for rows in zip(*of_ranks, strict=True):
        by_tensor = zip(*(errors for _, errors in rows), strict=True)
        errors = list(map(max, by_tensor))
        named = dict(zip(WHAT, errors, strict=True))
        report.add("nccl", **rows[0][0], **named, verdict="PASS" if max(errors) <= BOUND else "FAIL")


def check_calls(report: CheckReport, backend: str = "nccl") -> None:
    """Makes each call of the transport in a world of one rank, which is bound to its GPU or not."""
    on_gpu = backend == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for bound in (True, False) if on_gpu else (False,):
        with row_of(report, "calls of one rank", call="connect", bound=bound) as row, world_of_one(device, bound):
            transport = TorchTransport(group_of_this_rank(None), "GPU check")
            transport.connect({(channel, (0,)) for channel in CHANNELS})
            for call, wrong in _calls(transport, device):
                verdict = "FAIL" if wrong else "PASS"
                report.add("calls of one rank", call=call, bound=bound, wrong=wrong, verdict=verdict)
            row |= {"wrong": "", "verdict": "PASS"}


def _calls(transport: TorchTransport, device: torch.device) -> Iterator[tuple[str, str]]:
    """Each call on two communicators, and its error or the difference of its result."""
    nothing = torch.empty(0, 16, dtype=torch.uint8, device=device)

    def all_gather(channel: str, mine: Tensor, got: Tensor) -> Work:
        return transport.all_gather(channel, (0,), (len(mine),), [(mine, got)])

    def reduce_scatter(channel: str, mine: Tensor, got: Tensor) -> Work:
        return transport.reduce_scatter(channel, (0,), [(got, mine)])

    def messages_to_itself(channel: str, mine: Tensor, got: Tensor) -> Work:
        return transport.exchange(channel, [(0, mine)], [(0, got)])

    def all_to_all(channel: str, mine: Tensor, got: Tensor) -> Work:
        got.copy_(mine)  # there is no other rank
        return transport.all_to_all(channel, (0,), nothing, nothing)

    calls = [all_gather, all_to_all]
    if transport.can_reduce:  # gloo sends nothing to its own rank
        calls += [reduce_scatter, messages_to_itself]
    for call in calls:
        wrong = ""
        for channel in CHANNELS:
            mine = torch.arange(6.0, device=device).view(3, 2)
            got = torch.zeros_like(mine)
            try:
                call(channel, mine, got).wait()
                difference = float((got - mine).abs().max())
                wrong = wrong or (f"differs by {difference}" if difference else "")
            except Exception as error:
                wrong = wrong or said(error)
        yield call.__name__, wrong


def _rank(rank: int, ranks: int, backend: str, store: str, sizes: CheckSizes, pipe: Connection) -> None:
    """One rank. The world is bound to its device, as in trainers."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, device_id=bound)
    try:
        pipe.send([(row, errors) for row, errors in _errors(ranks, sizes, device)])
    finally:
        dist.destroy_process_group()


def _attention(cp: ContextParallel | AllRanks) -> Callable:
    return lambda q, k, v: context_parallel_attention(q, k, v, cp, return_lse=True)


def _errors(ranks: int, sizes: CheckSizes, device: torch.device) -> list[tuple[dict, list[float]]]:
    torch.manual_seed(0)
    dim, found = sizes.speed_head_dims[0], []
    whole = [torch.randn(sizes.rows_per_rank[-1] * ranks, 1, h, dim, device=device) for h in (8, 4, 4, 8)]
    for name, strategy in STRATEGIES.items():
        in_rounds = {"head_parallel_size": 2, "head_rounds": 2}
        for options in ({}, {"head_parallel_size": 2}, in_rounds, {"overlap": "no"}):
            if not options.keys() <= {*in_rounds, *strategy.options}:
                continue
            try:
                local, cp = AllRanks(ranks, name, **options), ContextParallel(name, **options)
                expected = with_gradients(_attention(local), *whole)
            except UsageError:
                continue  # the strategy does not support the number of ranks
            got = with_gradients(_attention(cp), *(cp.shard(x) for x in whole))
            row = {"strategy": name, "options": " ".join(map(str, options)), "ranks": ranks}
            found.append((row, compare(got, tuple(cp.shard(x).double() for x in expected))))
    return found
