"""The contents of a checkpoint: weights, optimizer, schedule, random generators, and the progress of the run."""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import RerunState

from megatron.context_parallel.trainer.faults.findings import Findings
from megatron.context_parallel.trainer.model.data_parallel import DataParallel

from .data_digest import Digests
from .optimizer_state import sharded_optimizer
from .sharded_weights import sharded_weights


@dataclass
class Progress:
    """The progress of a run, saved in its checkpoints."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    planned_train_samples: int = 0  # of the whole run; 0: unknown
    train_data: Digests = field(default_factory=dict)  # empty: unknown, or mock data


@dataclass
class TrainState:
    """Everything that a checkpoint saves and restores. Of the findings it saves whether to repeat a step."""

    model: list[DataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    progress: Progress
    findings: Findings


def sharded_state(state: TrainState, *, optimizer: bool, generators: bool, loading: bool = False) -> dict:
    """The state dict of `state` for megatron-core's dist_checkpointing, to save or to load. Every rank calls this."""
    sharded: dict[str, Any] = {f"model{i}": sharded_weights(chunk, loading) for i, chunk in enumerate(state.model)}
    if optimizer:
        sharded["optimizer"] = sharded_optimizer(state.optimizer, state.model, loading)
    if generators:
        rank, world = dist.get_rank(), dist.get_world_size()
        sharded["rng"] = ShardedObject("rng", _generators(), (world,), (rank,))
    if not loading:
        sharded["progress"] = asdict(state.progress)
        sharded["scheduler"] = state.scheduler.state_dict()
        if state.findings.machine.state is RerunState.WILL_RERUN_FROM_CHECKPOINT:
            sharded["rerun"] = state.findings.machine.state_dict(None, "torch_dist")
    return sharded


def _generators() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_generators(states: dict[str, Any]) -> bool:
    """Restores the random generators of this rank, unless they are those of another kind of device. Returns whether."""
    if states["device"].shape != torch.cuda.get_rng_state().shape:  # one was a GPU, the other a CPU
        return False
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    return True
