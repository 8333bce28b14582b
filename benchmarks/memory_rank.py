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

from benchmarks.job import run_job
from benchmarks.training_rank import random_batches
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.config.flags import Arguments

STEP = "training step"
SHORT = 64  # tokens of a rank in the step that loads code and starts threads


def measure(job: dict) -> list[dict]:
    """The largest resident memory above the start, and the allocator's peak, in bytes, of each rank.

    `job` has the `flags` of the trainer.
    """
    args = parse_args(job["flags"])
    setup.initialize_model_parallel(args)
    short = replace(args, seq_length=SHORT * args.context_parallel_size)
    two_steps(short)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident memory counts from here
    before = resident("VmRSS")
    two_steps(args)
    found = {"resident": resident("VmHWM") - before, "allocated": allocated(args)}
    parallel_state.destroy_model_parallel()
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def two_steps(args: Arguments) -> None:
    """Builds a model and trains it; the first step makes the optimizer's numbers. Nothing stays."""
    setup.seed_all(args.seed)
    state = training.build_state(args, Progress())
    data = [random_batches(args) for _ in state.model]
    for _ in range(2):
        with torch.profiler.record_function(STEP):
            training.train_step(args, state, data, time.monotonic())
    del state, data
    gc.collect()


def resident(what: str) -> int:
    """Bytes of a line of this process's status."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def allocated(args: Arguments) -> int:
    """The most bytes of tensors at once in the second step, by PyTorch's profiler of the allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        two_steps(args)
    assert profile.profiler is not None
    total = most = steps = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        steps += event.name() == STEP
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total) if steps == 2 else 0
    return most


if __name__ == "__main__":
    run_job(measure)
