"""The code of each rank of memory.py: one training step measured in resident memory, and one by the allocator."""

import ctypes
import gc
import re
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from benchmarks.job import run_job
from benchmarks.training_rank import random_batches
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.train_state import Progress, TrainState
from megatron.context_parallel.trainer.config.flags import Arguments

SHORT = 64  # tokens of a rank in the step that loads code and starts threads


def measure(job: dict) -> list[dict]:
    """The largest resident memory above the start, and the allocator's peak, in bytes, of each rank.

    `job` has the `flags` of the trainer.
    """
    args = parse_args(job["flags"])
    setup.initialize_model_parallel(args)
    short = replace(args, seq_length=SHORT * args.context_parallel_size)
    one_step(short, *started(short))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident memory counts from here
    before = resident("VmRSS")
    state, data = started(args)
    for _ in range(2):  # the first step makes the optimizer's numbers
        one_step(args, state, data)
    found = {"resident": resident("VmHWM") - before, "allocated": allocated_in_a_step(args, state, data)}
    parallel_state.destroy_model_parallel()
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def started(args: Arguments) -> tuple[TrainState, list]:
    setup.seed_all(args.seed)
    return training.build_state(args, Progress()), [random_batches(args)]


def one_step(args: Arguments, state: TrainState, data: list) -> None:
    training.train_step(args, state, data, time.monotonic())


def resident(what: str) -> int:
    """Bytes of a line of this process's status."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def allocated_in_a_step(args: Arguments, state: TrainState, data: list) -> int:
    """The most bytes of tensors at once in a step: those before it, and what PyTorch's profiler sees of the allocator.

    Frees of tensors made before the step are not seen; they are the last batch.
    """
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    total = most = sum(storages.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        one_step(args, state, data)
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


if __name__ == "__main__":
    run_job(measure)
