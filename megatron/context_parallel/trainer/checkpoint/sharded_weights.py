"""Sharded weights, as the whole tensors of a checkpoint.

With FSDP each rank has some rows of every weight and of its optimizer states. Checkpoints hold whole tensors, so a run
with another kind of sharding can resume from them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.context_parallel.trainer.model.data_parallel import DataParallel
from megatron.context_parallel.trainer.model.torch_fsdp2 import TorchFSDP2


def parameters_of(chunk: DataParallel) -> dict[str, torch.nn.Parameter]:
    """The weights that the optimizer updates, by their names in the model; with FSDP this rank's rows, as DTensors."""
    if isinstance(chunk, DistributedDataParallel | TorchFSDP2):
        return dict(chunk.module.named_parameters())
    return dict(chunk.param_and_grad_buffer.optimizer_named_parameters)


def described(chunk: DataParallel) -> list[tuple[str, ShardedBase, torch.nn.Parameter]]:
    """For each weight, its name in `sharded_weights`, its entry in checkpoints, and the parameter."""
    if isinstance(chunk, DistributedDataParallel):
        entries = chunk.module.sharded_state_dict()
        weights = {id(parameter): parameter for parameter in chunk.module.parameters()}
        return [(name, x, weights[id(x.data)]) for name, x in entries.items() if id(x.data) in weights]
    parameters = parameters_of(chunk)
    return [(name, x, parameters[weight]) for name, (x, weight) in chunk.descriptions.items() if weight]


def sharded_weights(chunk: DataParallel, loading: bool) -> dict[str, ShardedBase]:
    """The state dict of a model chunk for megatron-core's dist_checkpointing, to save or to load."""
    if isinstance(chunk, DistributedDataParallel):
        return chunk.module.sharded_state_dict()
    entries = {name: x for name, (x, weight) in chunk.descriptions.items() if not weight}
    for name, entry, parameter in described(chunk):
        dtype = chunk.config.params_dtype
        data = empty(parameter, dtype) if loading else gather_rows(parameter, rows_of(parameter), dtype)
        entries[name] = replace(entry, data=data)
    return entries


def load_weights(chunk: DataParallel, loaded: dict[str, Any]) -> None:
    """Restore the weights of a model chunk from a loaded state dict. FSDP has them after `install_weights` only."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.module.load_state_dict(loaded)
        return
    for name, _, parameter in described(chunk):
        copy_share(parameter, loaded[name], rows_of(parameter))


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


# --------------------------------------------------------------------------------------------------- one tensor


class RowSharding(NamedTuple):
    """The ranks that shard the rows of a weight, and how many rows each has. Megatron-FSDP cuts where buckets end."""

    group: dist.ProcessGroup
    counts: list[int]


def rows_of(parameter: Tensor) -> RowSharding | None:
    """How the rows of a weight are sharded; None if each rank has all of them. All of these ranks call it."""
    if not isinstance(parameter, DTensor):
        return None
    group = parameter.device_mesh.get_group(next(i for i, x in enumerate(parameter.placements) if x.is_shard()))
    mine = torch.tensor([len(parameter.to_local())], device=torch.cuda.current_device())  # the rows may be on the host
    counts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, mine, group)
    return RowSharding(group, [int(count) for count in counts])


def empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor on the host for all rows of a tensor that may be sharded."""
    return torch.empty(tensor.shape, dtype=dtype)


def gather_rows(tensor: Tensor, rows: RowSharding | None, dtype: torch.dtype) -> Tensor:
    """All rows of a tensor, on the host. The ranks that shard it call this together."""
    tensor = tensor.detach()
    if not rows:
        return tensor.to(device="cpu", dtype=dtype)
    local = _local(tensor)
    padded = local.new_zeros(max(rows.counts), *tensor.shape[1:], device=torch.cuda.current_device())
    padded[: len(local)] = local
    gathered = [torch.empty_like(padded) for _ in rows.counts]
    dist.all_gather(gathered, padded, rows.group)
    parts = [part[:count] for part, count in zip(gathered, rows.counts, strict=True)]
    return torch.cat(parts).to(device="cpu", dtype=dtype)


@torch.no_grad()
def copy_share(tensor: Tensor, values: Tensor, rows: RowSharding | None) -> None:
    """Copy this rank's part of the whole `values`."""
    if rows:
        rank = dist.get_rank(rows.group)
        values = values[sum(rows.counts[:rank]) : sum(rows.counts[: rank + 1])]
    _local(tensor).copy_(values)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
