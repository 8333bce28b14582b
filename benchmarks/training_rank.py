"""The code of each rank of training_step.py: a model and optimizer per strategy, one step of each in turn."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import torch
from megatron.core import parallel_state

from benchmarks.cases import RECOMPUTATION, Case, parse_case
from benchmarks.job import run_job
from benchmarks.rounds import interleave
from benchmarks.stopwatch import Stopwatch, TimedKernel
from megatron.context_parallel.integration import spec
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.config.flags import Arguments

TOLERANCE = 1e-4  # relative difference of a loss from the first case's


def measure(job: dict) -> list[dict]:
    """Timed training steps of every case; collective over the world.

    `job` has `flags` of the trainer, `problem`, `cases`, `recompute`, `rounds` and `warm_up`. Returns what
    `attention_rank.measure` does, with the largest relative difference of a loss from the first case's as `error`.
    """
    watch = Stopwatch()
    watch.watch_waits()
    spec.kernel_for = cache(lambda *args, **how: TimedKernel(kernel_for(*args, **how), watch))  # one for all layers
    args = parse_args(job["flags"])
    setup.initialize_model_parallel(args)
    entries, runs, losses = [], [], []
    for text, (how, changes) in product(job["cases"], RECOMPUTATION.items() if job["recompute"] else [("", {})]):
        entries.append({"case": text + how, "error": None, "failure": None, "rounds": []})
        losses.append([])
        own = replace(args, **changes)
        runs.append((entries[-1], training_step(own, parse_case(text), losses[-1])))
    interleave(runs, job["rounds"], job["warm_up"], watch)
    for entry, own in zip(entries, losses, strict=True):
        entry["error"] = max(abs(loss / first - 1) for loss, first in zip(own, losses[0], strict=True))
        if not entry["error"] <= TOLERANCE:
            entry["failure"] = f"losses differ from those of {entries[0]['case']} by {entry['error']:.1e}"
            entry["rounds"] = []
    parallel_state.destroy_model_parallel()
    return entries


def training_step(args: Arguments, case: Case, losses: list[float]) -> Callable[[], None]:
    """One step of the trainer with this strategy, from the same weights and data as any other; appends the loss."""
    own = replace(args, cp_layers=(case.choice,) * args.num_layers, cp_layout=case.choice.layout)
    setup.seed_all(args.seed)
    state, data = training.build_state(own, Progress()), [random_batches(own)]

    def step() -> None:
        losses.append(training.train_step(own, state, data, time.monotonic())[0])

    return step


def random_batches(args: Arguments) -> Iterator[dict[str, torch.Tensor]]:
    """Whole sequences of random tokens, the same for every case and rank."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.micro_batch_size, args.seq_length + 1)
    positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
    while True:
        text = torch.randint(args.vocabulary, shape, generator=generator)
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": positions}
        yield batch | {"loss_mask": torch.ones(positions.shape)}


if __name__ == "__main__":
    run_job(measure)
