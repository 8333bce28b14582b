"""Checkpoints: what is in one, how it is written so that an interrupted save harms nothing, how a run resumes.

A directory of checkpoints holds `iter_0000100/` per save and `latest_checkpointed_iteration.txt`, the tracker,
which names the last complete one.
"""

import json
import os
import queue
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import RerunState

from ..errors import UsageError
from .findings import Findings
from .flags import Arguments

TRACKER = "latest_checkpointed_iteration.txt"
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_RANK_LAYOUT = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


@dataclass
class Progress:
    """How far a run has come; a checkpoint carries it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0


@dataclass
class TrainState:
    """Everything that a checkpoint saves and restores; of the findings, whether a step is to be computed again."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    progress: Progress
    findings: Findings


def latest_iteration(directory: str | Path) -> int | None:
    """The iteration the tracker names, or None if there is no tracker.

    Raises:
        UsageError: the tracker does not hold a number.
    """
    tracker = Path(directory) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise UsageError(f"--load {directory}: {TRACKER} holds {text!r}; it should hold an iteration, such as 100")
    return int(text)


def iteration_directory(directory: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is, or will be."""
    return Path(directory) / f"iter_{iteration:07d}"


# ---------------------------------------------------------------------------------------------------- saving


def save_checkpoint(args: Arguments, state: TrainState) -> None:
    """Write `--save`/iter_NNNNNNN and make it the latest. Every rank calls it; all return when it is complete.

    Written under a temporary name, flushed to the disk, renamed, and only then named by the tracker.
    """
    assert args.save is not None
    final = iteration_directory(args.save, state.progress.iteration)
    temporary = final.with_name(final.name + ".incomplete")
    _on_first_rank(lambda: _start_save(temporary))
    # The writer would start a server process per rank for this queue, which outlives a rank that is killed.
    filesystem_async._results_queue = queue.Queue()
    sharded = _sharded_state(state, optimizer=not args.no_save_optim, generators=not args.no_save_rng)
    dist_checkpointing.save(sharded, str(temporary), content_metadata=_METADATA)
    _on_first_rank(lambda: _publish(args, temporary, final, state.progress.iteration))


def _publish(args: Arguments, temporary: Path, final: Path, iteration: int) -> None:
    (temporary / "args.json").write_text(json.dumps(plain_args(args), indent=1, sort_keys=True))
    for path in [*temporary.rglob("*"), temporary]:
        _flush(path)
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    _flush(final.parent)
    tracker = final.parent / TRACKER
    draft = tracker.with_suffix(".incomplete")
    draft.write_text(str(iteration))
    _flush(draft)
    draft.replace(tracker)
    _flush(final.parent)


def plain_args(args: Arguments) -> dict[str, object]:
    """The arguments as JSON can hold them; what it cannot is written as text."""
    return json.loads(json.dumps(vars(args), default=str))


def _start_save(temporary: Path) -> None:
    for interrupted in temporary.parent.glob("iter_*.incomplete"):
        shutil.rmtree(interrupted)
    temporary.mkdir(parents=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_first_rank(action: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


# --------------------------------------------------------------------------------------------------- loading


def load_checkpoint(args: Arguments, state: TrainState) -> bool:
    """Restore the latest checkpoint of `--load` into `state`; whether there was one. Every rank calls it.

    `--finetune` restores the weights alone; `--no-load-optim` and `--no-load-rng` leave those parts out. The parallel
    layout may have changed since; then the random generators keep their fresh seeds.
    """
    assert args.load is not None
    iteration = latest_iteration(args.load)
    if iteration is None:
        return False
    directory = iteration_directory(args.load, iteration)
    if not directory.is_dir():
        raise UsageError(
            f"--load {args.load}: {TRACKER} names {directory.name}, which is not there; write another in it"
        )
    saved = json.loads((directory / "args.json").read_text())
    optimizer, generators = _parts_to_load(args, saved)
    wanted = _sharded_state(state, optimizer=optimizer, generators=generators, loading=True)
    again = _is_to_compute_again(args, saved, directory)
    if again:
        wanted["rerun"] = state.findings.machine.state_dict(None, "torch_dist", force=True)
    loaded = dist_checkpointing.load(wanted, str(directory))
    for index, chunk in enumerate(state.model):
        chunk.module.load_state_dict(loaded[f"model{index}"])
    if optimizer:
        _load_optimizer(state.optimizer, loaded["optimizer"])
    else:
        state.optimizer.reload_model_params()
    if generators:
        _set_generators(loaded["rng"])
    if not args.finetune:
        state.progress.__dict__.update(loaded["progress"])
        state.scheduler.load_state_dict(loaded["scheduler"])
    if again:
        state.findings.machine.load_state_dict(loaded["rerun"])
    return True


def _parts_to_load(args: Arguments, saved: dict) -> tuple[bool, bool]:
    """Whether to restore the optimizer, and the random generators, of a checkpoint made with arguments `saved`."""
    optimizer = not (args.finetune or args.no_load_optim or saved["no_save_optim"])
    same_ranks = all(saved[size] == getattr(args, size) for size in _RANK_LAYOUT)
    return optimizer, same_ranks and not (args.finetune or args.no_load_rng or saved["no_save_rng"])


def _is_to_compute_again(args: Arguments, saved: dict, directory: Path) -> bool:
    """Whether `--rerun-mode` saved the checkpoint to compute its next step on other devices, and this run does so."""
    if args.finetune or "rerun" not in dist_checkpointing.load_common_state_dict(str(directory)):
        return False
    reason = "" if args.rerun_mode == "validate_results" else "without --rerun-mode validate_results"
    if not all(saved[size] == getattr(args, size) for size in _RANK_LAYOUT):
        reason = "on another layout of ranks"
    if reason and dist.get_rank() == 0:
        print(f"--load {args.load}: its next step is not compared with the suspicious one, {reason}", flush=True)
    return not reason


# ------------------------------------------------------------------------------------------ what is in one


def _sharded_state(state: TrainState, *, optimizer: bool, generators: bool, loading: bool = False) -> dict:
    sharded = {f"model{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(state.model)}
    if optimizer:
        _count_bucket_padding(state.model)
        _prime_adam(state.optimizer)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(sharded, is_loading=loading, metadata=_METADATA)
    if generators:
        rank, world = dist.get_rank(), dist.get_world_size()
        sharded["rng"] = ShardedObject("rng", _generators(), (world,), (rank,))
    if not loading:
        sharded["progress"] = asdict(state.progress)
        sharded["scheduler"] = state.scheduler.state_dict()
        if state.findings.machine.state is RerunState.WILL_RERUN_FROM_CHECKPOINT:
            sharded["rerun"] = state.findings.machine.state_dict(None, "torch_dist")
    return sharded


def _count_bucket_padding(model: list[DistributedDataParallel]) -> None:
    # megatron-core gathers the optimizer's buckets without the padding between them, then cuts parameters out at
    # offsets that count it: wrong values after a padded bucket. With the padding gathered too they are right.
    for buffer in (buffer for chunk in model for buffer in chunk.buffers):
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def _prime_adam(optimizer: MegatronOptimizer) -> None:
    # PyTorch's Adam counts steps per parameter from its first step on; megatron-core reads the count before that.
    for part in _torch_adams(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        for parameter_state in part.optimizer.state.values():
            parameter_state.setdefault("step", torch.tensor(0.0))


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict) -> None:
    adams = _torch_adams(optimizer)
    per_parameter = loaded.pop("param_state", None) if adams else None
    optimizer.load_state_dict(loaded)
    for part in adams:
        states = part.optimizer.state.values()
        steps = [state.pop("step") for state in states]
        if per_parameter is not None:  # megatron-core fills in all that a state has, and has no step for each parameter
            part.load_parameter_state_from_fully_reshardable(per_parameter)
        for state, step in zip(states, steps, strict=True):
            state["step"] = step.clone()  # it restored one tensor for all parameters, which each would advance


def _torch_adams(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    parts = optimizer.chained_optimizers
    return [part for part in parts if isinstance(part.optimizer, torch.optim.Adam)]


def _generators() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
