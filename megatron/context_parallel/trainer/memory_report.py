"""The predicted memory of a run: its table, whether it fits a device, and the answer to a lack of memory."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from rich.table import Table

from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import TENSOR_SHARE, for_tensors, load_cluster
from megatron.context_parallel.cluster.step.fit import advice
from megatron.context_parallel.cluster.step.longest import longest_with_advice, shortest
from megatron.context_parallel.cluster.step.memory import fullest, host_memory, peak
from megatron.context_parallel.cluster.step.moment import Moment
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.strategies import distinct

from .config.flags import Arguments
from .config.workload import model_of, run_of

SURE = 0.9  # of what a run needs by the prediction, if that should have fitted and did not


def memory_table(args: Arguments) -> Table:
    """The fullest moment of a rank of the fullest stage, by kind."""
    model = model_of(args)
    stage, moment = _fullest(args)
    title = f"{model.parameters:,} parameters ({model.table_parameters:,} in embeddings); "
    title += f"memory of a rank of stage {stage}, the largest, in its fullest moment: {moment.name}"
    table = Table("memory", "per rank", "formula", title=title)
    for what, size, formula in moment.items:
        table.add_row(what, _gib(size), formula)
    table.add_row("total", _gib(moment.bytes), "excludes fragmentation")
    if on_host := host_memory(model, _fullest_run(args), stage):
        table.add_row("in host memory", _gib(on_host), "what is offloaded; not part of the total")
    return table


def named_device(args: Arguments) -> float | None:
    """GiB of the device that the flags name."""
    if args.device_memory or not args.cp_cluster:
        return args.device_memory
    return load_cluster(args.cp_cluster, "--cp-cluster").device.memory_GiB


def verdict(args: Arguments, memory: float) -> str:
    """Whether the run's tensors fit a device of `memory` GiB, and else the flags to add."""
    needed = _fullest(args)[1].bytes
    shares = f"{needed / 2**30:.3g} GiB of {_room(memory)}"
    if needed <= for_tensors(memory):
        return f"fits: {shares}"
    return f"does not fit: {shares}; {_advice(args, memory)}"


def longest_run(args: Arguments, memory: float) -> tuple[Arguments, str]:
    """The run with the longest sequence that fits `memory` GiB, and a line about it and about the first advice.

    Raises:
        UsageError: no sequence fits.
    """
    model, run = model_of(args), _fullest_run(args)
    found, *more = longest_with_advice(model, run, for_tensors(memory))
    if not found.tokens:
        run = replace(run, seq_length=shortest(run))
        why = f"no sequence fits: {run.seq_length} tokens need {found.bytes / 2**30:.3g} GiB of {_room(memory)}"
        raise UsageError(f"--longest: {why}; {advice(model, run, for_tensors(memory))}")
    line = f"longest sequence: {found.tokens:,} tokens ({found.bytes / 2**30:.3g} GiB of {_room(memory)})"
    for one in more:
        line += f"; {one.tokens:,} with {' '.join(change.flags for change in one.changes)}"
    return replace(args, seq_length=found.tokens), line


@contextmanager
def explain_out_of_memory(args: Arguments) -> Iterator[None]:
    """Prints what the run needs, and the flags with which it needs less, on a rank that has no memory left."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            needed = _fullest(args)[1].bytes
            memory = min(_memory_here(), SURE * needed / TENSOR_SHARE) / 2**30
            show(memory_table(args), file=sys.stderr)
            rank = os.environ.get("RANK", "0")
            print(f"rank {rank}: out of memory; {_advice(args, memory)}", file=sys.stderr, flush=True)
        raise


def lacks_memory(error: BaseException) -> bool:
    """Whether `error` says that no memory was left, on a GPU or on the host."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _memory_here() -> float:
    """Bytes of this process's device."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine if limit == resource.RLIM_INFINITY else min(limit, machine)


def _fullest(args: Arguments) -> tuple[int, Moment]:
    """The stage that needs the most memory, and its fullest moment."""
    return fullest(model_of(args), _fullest_run(args))


def _fullest_run(args: Arguments) -> TrainConfig:
    """The configuration with the strategy, of those of the layers, that needs the most memory."""
    model = model_of(args)
    runs = [run_of(args, choice) for choice in distinct(args.cp_layers)] or [run_of(args)]
    return max(runs, key=lambda run: peak(model, run).bytes)  # runs differ only in the attention buffers


def _advice(args: Arguments, memory: float) -> str:
    return advice(model_of(args), _fullest_run(args), for_tensors(memory))


def _room(memory: float) -> str:
    """GiB that tensors may take."""
    return f"{for_tensors(memory) / 2**30:.3g}, {TENSOR_SHARE:.0%} of {memory:.3g}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**30:.3g} GiB"
