"""The code of each rank of training_step.py: a model and optimizer per strategy, one step of each in turn."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.cases import RECOMPUTATION, Case, Workload, parse_case
from benchmarks.device import EmulatedDevice, device_of, python_share
from benchmarks.device_training import optimizer_takes_time, products_take_time
from benchmarks.job import run_job
from benchmarks.rounds import interleave
from benchmarks.stopwatch import Stopwatch
from benchmarks.subjects import block_kernel, documents_of
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.layer_time import LayerTime
from megatron.context_parallel.cluster.step.placement_costs import costs_of_run
from megatron.context_parallel.integration import spec
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.place_documents import Costs, place
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.arguments.preset_model import preset_model
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of, run_of

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}  # relative difference of a loss from the first case's


def measure(job: dict) -> list[dict]:
    """Timed training steps of every case; collective over the world.

    `job` has `flags` of the trainer, `problem`, `cases`, `recompute`, `rounds`, `warm_up`, `cluster`, `products_of` (a
    preset of the trainer or null), and `stands_for`, the tokens for which devices take the time. Returns what
    `attention_rank.measure` does, with the largest relative difference of a loss from the first case's as `error`.
    With devices, the losses of the first step are compared, which is computed and not timed.
    """
    watch = Stopwatch()
    watch.watch_waits()
    args = parse_args(job["flags"])
    problem = Workload(**job["problem"])
    device = device_of(job["cluster"], problem)
    spec.kernel_for = cache(lambda *args, **how: block_kernel(kernel_for(*args, **how), watch, device))
    if device:
        products_take_time(device, product_times(args, job["products_of"], job["stands_for"], device))
    setup.initialize_model_parallel(args)
    entries, runs, losses = [], [], []
    for text, (how, changes) in product(job["cases"], RECOMPUTATION.items() if job["recompute"] else [("", {})]):
        entries.append({"case": text + how, "error": None, "failure": None, "rounds": []})
        losses.append([])
        own = replace(args, **changes)
        case = parse_case(text)
        documents = case_documents(own, case, problem, job["cluster"])
        runs.append((entries[-1], training_step(own, case, documents, losses[-1], device)))
    if device is None:
        interleave(runs, job["rounds"], job["warm_up"], watch)
        check_losses(entries, losses, TOLERANCE[problem.dtype])
    else:
        for _, step in runs:
            step()
        check_losses(entries, losses, TOLERANCE[problem.dtype])
        if dist.get_rank() == 0:
            print("Devices take time and compute nothing from here on: losses are not those of a model.", flush=True)
        for entry, step in runs:
            if entry["failure"] is None:
                entry.update(python_share(step, step, device))
        device.computes = False
        interleave([run for run in runs if run[0]["failure"] is None], job["rounds"], 0, watch)
    parallel_state.destroy_model_parallel()
    return entries


def check_losses(entries: list[dict], losses: list[list[float]], tolerance: float) -> None:
    """Fills in the errors; entries with other losses than the first fail, and lose their rounds."""
    for entry, own in zip(entries, losses, strict=True):
        entry["error"] = max(abs(loss / first - 1) for loss, first in zip(own, losses[0], strict=True))
        if not entry["error"] <= tolerance:
            entry["failure"] = f"losses differ from those of {entries[0]['case']} by {entry['error']:.1e}"
            entry["rounds"] = []


def product_times(args: Arguments, like: str | None, stands_for: int, device: EmulatedDevice) -> LayerTime:
    """The times of matrix products; with `like` in proportion to attention as in a layer of that preset.

    The proportion is that of sequences of `stands_for` tokens.
    """
    own = LayerTime(model_of(args), run_of(args), device.device)
    if like is None:
        return own
    meant = LayerTime(preset_model(like, stands_for), replace(own.run, seq_length=stands_for), device.device)
    fewer = args.seq_length / stands_for * own.model.queries / meant.model.queries  # so much of its time has attention
    return replace(own, slower=fewer * sum(meant.products.values()) / sum(own.products.values()))


def case_documents(args: Arguments, case: Case, problem: Workload, cluster: str | None) -> Documents | None:
    """The documents of every batch, placed if the case says so."""
    documents = documents_of(problem, problem.length)
    if documents is None or not case.placed:
        return documents
    run = run_of(args, case.choice)
    costs = costs_of_run(model_of(args), run, load_cluster(cluster)) if cluster else Costs(1.0)
    return documents.placed(place(documents, case.choice.plan(args.context_parallel_size).n, costs))


def training_step(
    args: Arguments, case: Case, documents: Documents | None, losses: list[float], device: EmulatedDevice | None
) -> Callable[[], None]:
    """One step of the trainer with this strategy, from the same weights and data as any other; appends the loss."""
    layers = (case.choice,) * args.num_layers
    own = replace(args, cp_layers=layers, cp_layout=case.choice.layout, cp_place_documents=case.placed)
    setup.seed_all(args.seed)
    state, data = training.build_state(own, Progress()), [random_batches(own, documents)]
    if device:
        optimizer_takes_time(state, device, LayerTime(model_of(own), run_of(own, case.choice), device.device))

    def step() -> None:
        losses.append(training.train_step(own, state, data, time.monotonic())[0])

    return step


def random_batches(args: Arguments, documents: Documents | None = None) -> Iterator[dict[str, Any]]:
    """Whole sequences of random tokens, the same for every case and rank, with the same documents in each."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.micro_batch_size, args.seq_length + 1)
    positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
    while True:
        text = torch.randint(args.vocabulary, shape, generator=generator)
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": positions}
        yield batch | {"loss_mask": torch.ones(positions.shape), "documents": documents}


if __name__ == "__main__":
    run_job(measure)
