"""The weights of a model in a checkpoint: whole tensors, in the same format for every kind of sharding."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.tensor import DTensor

from megatron.context_parallel.trainer.model.data_parallel import DataParallel
from megatron.context_parallel.trainer.model.torch_fsdp2 import TorchFSDP2

from .tensor_owners import Shard, Shares, copy_shares, shard_of, shares_of, whole_tensors


def parameters_of(chunk: DataParallel) -> dict[str, torch.nn.Parameter]:
    """The weights that the optimizer updates, by their names in the model; with FSDP this rank's rows, as DTensors."""
    if isinstance(chunk, DistributedDataParallel | TorchFSDP2):
        return dict(chunk.module.named_parameters())
    return dict(chunk.param_and_grad_buffer.optimizer_named_parameters)


class Described(NamedTuple):
    """A weight: its name in `sharded_weights`, its entry in checkpoints, the parameter, and how FSDP shards it.

    `shares` is None if each rank has all of it.
    """

    name: str
    entry: ShardedBase
    parameter: torch.nn.Parameter
    shares: Shares | None


def described(chunk: DataParallel) -> list[Described]:
    """The weights of a model chunk. All ranks call it."""
    if isinstance(chunk, DistributedDataParallel):
        entries = chunk.module.sharded_state_dict()
        weights = {id(parameter): parameter for parameter in chunk.module.parameters()}
        return [Described(name, x, weights[id(x.data)], None) for name, x in entries.items() if id(x.data) in weights]
    parameters = parameters_of(chunk)
    found = []
    for name, (entry, weight) in chunk.descriptions.items():
        if weight:
            found.append(Described(name, entry, parameters[weight], None))
    shares = shares_of([_group_and_count(weight.parameter) for weight in found])
    return [weight._replace(shares=of_weight) for weight, of_weight in zip(found, shares, strict=True)]


def _group_and_count(parameter: torch.nn.Parameter) -> tuple[dist.ProcessGroup, int]:
    """The ranks that shard a weight, and how many numbers of it this rank has."""
    assert isinstance(parameter, DTensor)
    dimension = next(i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    return parameter.device_mesh.get_group(dimension), parameter.to_local().numel()


def sharded_weights(chunk: DataParallel, loading: bool) -> dict[str, ShardedBase]:
    """The state dict of a model chunk for megatron-core's dist_checkpointing, to save or to load."""
    if isinstance(chunk, DistributedDataParallel):
        return chunk.module.sharded_state_dict()
    entries = {name: x for name, (x, weight) in chunk.descriptions.items() if not weight}
    weights = described(chunk)
    for weight, whole in zip(weights, whole_tensors(_shards(weights), chunk.config.params_dtype, loading), strict=True):
        if weight.shares and whole is not None:
            entries[weight.name] = weight.shares.owned(weight.entry, data=whole)
    return entries


def load_weights(chunk: DataParallel, loaded: dict[str, Any]) -> None:
    """Restore the weights of a model chunk from a loaded state dict. FSDP has them after `install_weights` only."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.module.load_state_dict(loaded)
        return
    weights = described(chunk)
    copy_shares(_shards(weights), [loaded.get(weight.name) for weight in weights], chunk.config.params_dtype)


def _shards(weights: list[Described]) -> list[Shard]:
    return [shard_of(weight.parameter, weight.entry, weight.parameter.shape, weight.shares) for weight in weights]


def install_weights(chunk: DataParallel) -> None:
    """Let a model chunk compute with the weights of its optimizer, of which each rank may have restored its share only.

    Call it once, when all is restored: FSDP keeps what it has gathered until the next forward pass.
    """
    if isinstance(chunk, DistributedDataParallel):
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
    elif not isinstance(chunk, TorchFSDP2):
        chunk.module.install_optimized_model_weights()
        chunk.start_param_sync()
