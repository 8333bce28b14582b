"""Weights that ranks share out, whole as checkpoints have them.

FSDP gives each rank some rows of every weight, and of what the optimizer keeps of it. Checkpoints hold whole tensors,
so a run that shares them out in another way can go on from them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.context_parallel.trainer.model.data_parallel import DataParallel, TorchFSDP2


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
        data = empty(parameter, dtype) if loading else gather_rows(parameter, rows_of(parameter), dtype)
        entries[name] = replace(entry, data=data)
    return entries


def load_weights(chunk: DataParallel, loaded: dict[str, Any]) -> None:
    """Restore the weights of a model chunk from what dist_checkpointing has loaded."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.module.load_state_dict(loaded)
        return
    for name, _, parameter in described(chunk):
        copy_share(parameter, loaded[name], rows_of(parameter))
    install_weights(chunk)


def install_weights(chunk: DataParallel) -> None:
    """Make the weights that a model chunk computes with those that its optimizer updates."""
    if not isinstance(chunk, DistributedDataParallel | TorchFSDP2):
        chunk.module.install_optimized_model_weights()
        chunk.start_param_sync()


# --------------------------------------------------------------------------------------------------- one tensor


class RowSharding(NamedTuple):
    """The ranks that share out the rows of a weight, and how many each has: Megatron-FSDP cuts where buckets end."""

    group: dist.ProcessGroup
    counts: list[int]


def rows_of(parameter: Tensor) -> RowSharding | None:
    """How the rows of a weight are shared out; None if each rank has all of them. All of these ranks call it."""
    if not isinstance(parameter, DTensor):
        return None
    group = parameter.device_mesh.get_group(next(i for i, x in enumerate(parameter.placements) if x.is_shard()))
    mine = torch.tensor([len(parameter.to_local())], device=parameter.to_local().device)
    counts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, mine, group)
    return RowSharding(group, [int(count) for count in counts])


def empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor on the host for all rows of one that ranks may share out."""
    return torch.empty(tensor.shape, dtype=dtype)


def gather_rows(tensor: Tensor, rows: RowSharding | None, dtype: torch.dtype) -> Tensor:
    """All rows of a tensor, on the host; the ranks that share it out call this together."""
    tensor = tensor.detach()
    if not rows:
        return tensor.to(device="cpu", dtype=dtype)
    local = _local(tensor)
    padded = local.new_zeros(max(rows.counts), *tensor.shape[1:])
    padded[: len(local)] = local
    gathered = [torch.empty_like(padded) for _ in rows.counts]
    dist.all_gather(gathered, padded, rows.group)
    parts = [part[:count] for part, count in zip(gathered, rows.counts, strict=True)]
    return torch.cat(parts).to(device="cpu", dtype=dtype)


@torch.no_grad()
def copy_share(tensor: Tensor, values: Tensor, rows: RowSharding | None) -> None:
    """Copy what this rank has of the whole `values`."""
    if rows:
        rank = dist.get_rank(rows.group)
        values = values[sum(rows.counts[:rank]) : sum(rows.counts[: rank + 1])]
    _local(tensor).copy_(values)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
