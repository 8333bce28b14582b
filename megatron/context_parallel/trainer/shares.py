"""Weights that ranks share out, whole as checkpoints have them.

FSDP gives each rank some rows of every weight, and of what the optimizer keeps of it. Checkpoints hold whole tensors, so
that any other way to share them out can go on from them.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .data_parallel import DataParallel, TorchFSDP2


def parameters_of(chunk: DataParallel) -> dict[str, torch.nn.Parameter]:
    """The weights that are updated, by their names in the model; with FSDP this rank's rows, as DTensors."""
    if isinstance(chunk, DistributedDataParallel | TorchFSDP2):
        return dict(chunk.module.named_parameters())
    return dict(chunk.param_and_grad_buffer.optimizer_named_parameters)


def described(chunk: DataParallel) -> list[tuple[str, ShardedBase, torch.nn.Parameter]]:
    """Of each weight: its name in `sharded_weights`, how checkpoints know it, and the parameter."""
    if isinstance(chunk, DistributedDataParallel):
        entries = chunk.module.sharded_state_dict()
        weights = {id(parameter): parameter for parameter in chunk.module.parameters()}
        return [(name, x, weights[id(x.data)]) for name, x in entries.items() if id(x.data) in weights]
    parameters = parameters_of(chunk)
    return [(name, x, parameters[weight]) for name, (x, weight) in chunk.descriptions.items() if weight]


def sharded_weights(chunk: DataParallel, loading: bool) -> dict[str, ShardedBase]:
    """The weights of a model chunk as megatron-core's dist_checkpointing saves them, or is to load them."""
    if isinstance(chunk, DistributedDataParallel):
        return chunk.module.sharded_state_dict()
    entries = {name: x for name, (x, weight) in chunk.descriptions.items() if not weight}
    for name, entry, parameter in described(chunk):
        dtype = chunk.config.params_dtype
        entries[name] = replace(entry, data=empty(parameter, dtype) if loading else whole(parameter, dtype))
    return entries


def load_weights(chunk: DataParallel, loaded: dict[str, Any]) -> None:
    """Restore the weights of a model chunk from what dist_checkpointing has loaded."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.module.load_state_dict(loaded)
        return
    for name, _, parameter in described(chunk):
        take(parameter, loaded[name])
    install_weights(chunk)


def install_weights(chunk: DataParallel) -> None:
    """Make the weights that a model chunk computes with those that its optimizer updates."""
    if not isinstance(chunk, DistributedDataParallel | TorchFSDP2):
        chunk.module.install_optimized_model_weights()
        chunk.start_param_sync()


# --------------------------------------------------------------------------------------------------- one tensor


def empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor on the host for all rows of one that ranks share out."""
    return torch.empty(tensor.shape, dtype=dtype)


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All rows of a tensor that ranks share out, on the host; all of these ranks call it."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor) or not (group := _sharers(tensor)):
        return tensor.to(device="cpu", dtype=dtype)
    local, counts = tensor.to_local(), _rows(tensor)
    padded = local.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(local)] = local
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)]).to(device="cpu", dtype=dtype)


@torch.no_grad()
def take(tensor: Tensor, values: Tensor) -> None:
    """Copy this rank's rows of the whole `values`; all ranks that share the tensor out call it."""
    if isinstance(tensor, DTensor):
        if group := _sharers(tensor):
            counts, rank = _rows(tensor), dist.get_rank(group)
            values = values[sum(counts[:rank]) : sum(counts[: rank + 1])]
        tensor = tensor.to_local()
    tensor.copy_(values)


def _sharers(tensor: DTensor) -> dist.ProcessGroup | None:
    """The ranks that share out the rows of a tensor; None if each has all of them."""
    sharded = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    return tensor.device_mesh.get_group(sharded[0]) if sharded else None


def _rows(tensor: DTensor) -> list[int]:
    """How many rows each of the sharers has: Megatron-FSDP cuts where its buckets end."""
    mine = torch.tensor([len(tensor.to_local())], device=tensor.to_local().device)
    counts = [torch.empty_like(mine) for _ in range(dist.get_world_size(_sharers(tensor)))]
    dist.all_gather(counts, mine, _sharers(tensor))
    return [int(count) for count in counts]
