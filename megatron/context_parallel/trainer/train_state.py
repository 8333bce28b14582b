"""What is in a checkpoint: weights, optimizer, schedule, random generators, and how far the run has come."""

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import RerunState

from .findings import Findings

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_FROM_FLAGS = ("max_lr", "min_lr", "betas", "eps")  # of a group of parameters; the schedule sets lr and weight decay


@dataclass
class Progress:
    """How far a run has come; a checkpoint carries it."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    planned_train_samples: int = 0  # of the whole run; 0: unknown


@dataclass
class TrainState:
    """Everything that a checkpoint saves and restores; of the findings, whether a step is to be computed again."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    progress: Progress
    findings: Findings


def sharded_state(state: TrainState, *, optimizer: bool, generators: bool, loading: bool = False) -> dict:
    """`state` as megatron-core's dist_checkpointing saves it, or is to load it; every rank calls this."""
    sharded = {f"model{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(state.model)}
    if optimizer:
        _count_bucket_padding(state.model)
        _prime_adam(state.optimizer)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(sharded, is_loading=loading, metadata=METADATA)
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


def load_optimizer(optimizer: MegatronOptimizer, loaded: dict) -> None:
    """Restore the optimizer from what dist_checkpointing has loaded; what flags say of it stays as they say now."""
    given = [{name: group[name] for name in _FROM_FLAGS} for group in optimizer.param_groups]
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
    for group, values in zip(optimizer.param_groups, given, strict=True):
        group.update(values)  # megatron-core restored the old ones, and the schedule would follow them


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


def set_generators(states: dict[str, Any]) -> None:
    """Restore the random generators of this rank."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
