"""Sharded weights, as the whole tensors of a checkpoint.

With FSDP each rank has some rows of every weight and of its optimizer states. Checkpoints hold whole tensors, so a run
with another kind of sharding can resume from them. Each tensor is whole on one rank only, its owner, which writes and
reads it. The owners have about as many numbers each, so a rank's host memory holds one part of a checkpoint.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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


class RowSharding(NamedTuple):
    """The ranks that shard the rows of a weight, and the rows of each. Megatron-FSDP cuts where buckets end.

    Attributes:
        owner: the rank of `group` that has the whole tensors of the weight while a checkpoint is saved or loaded.
    """

    group: dist.ProcessGroup
    counts: list[int]
    owner: int

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""
        return dist.get_rank(self.group) == self.owner

    @property
    def owner_in_world(self) -> int:
        """The owner's rank in the world."""
        return dist.get_global_rank(self.group, self.owner)

    def owned(self, entry: ShardedBase, **changes: Any) -> ShardedBase:
        """The owner's entry. Of several groups that shard a weight alike, the first one writes it."""
        instance = parallel_state.get_data_parallel_rank(with_context_parallel=True) // len(self.counts)
        return replace(entry, replica_id=(*entry.replica_id[:-1], instance), **changes)


class Described(NamedTuple):
    """A weight: its name in `sharded_weights`, its entry in checkpoints, the parameter, and how its rows are sharded.

    `rows` is None if each rank has all of them.
    """

    name: str
    entry: ShardedBase
    parameter: torch.nn.Parameter
    rows: RowSharding | None


def described(chunk: DataParallel) -> list[Described]:
    """The weights of a model chunk. All ranks call it."""
    if isinstance(chunk, DistributedDataParallel):
        entries = chunk.module.sharded_state_dict()
        weights = {id(parameter): parameter for parameter in chunk.module.parameters()}
        return [Described(name, x, weights[id(x.data)], None) for name, x in entries.items() if id(x.data) in weights]
    parameters = parameters_of(chunk)
    owned = Counter[int]()  # numbers of each owner
    found = []
    for name, (entry, weight) in chunk.descriptions.items():
        if not weight:
            continue
        parameter = parameters[weight]
        assert isinstance(parameter, DTensor)
        group, counts = _rows_of(parameter)
        owner = min(range(len(counts)), key=lambda rank: owned[rank])
        owned[owner] += parameter.numel()
        found.append(Described(name, entry, parameter, RowSharding(group, counts, owner)))
    return found


def sharded_weights(chunk: DataParallel, loading: bool) -> dict[str, ShardedBase]:
    """The state dict of a model chunk for megatron-core's dist_checkpointing, to save or to load."""
    if isinstance(chunk, DistributedDataParallel):
        return chunk.module.sharded_state_dict()
    entries = {name: x for name, (x, weight) in chunk.descriptions.items() if not weight}
    for name, entry, parameter, rows in described(chunk):
        whole = whole_tensor(parameter, rows, chunk.config.params_dtype, loading)
        if rows and whole is not None:
            entries[name] = rows.owned(entry, data=whole)
    return entries


def load_weights(chunk: DataParallel, loaded: dict[str, Any]) -> None:
    """Restore the weights of a model chunk from a loaded state dict. FSDP has them after `install_weights` only."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.module.load_state_dict(loaded)
        return
    for name, _, parameter, rows in described(chunk):
        copy_share(parameter, loaded.get(name), rows)


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


def _rows_of(parameter: DTensor) -> tuple[dist.ProcessGroup, list[int]]:
    """The ranks that shard the rows of a weight, and the rows of each."""
    group = parameter.device_mesh.get_group(next(i for i, x in enumerate(parameter.placements) if x.is_shard()))
    mine = torch.tensor([len(parameter.to_local())], device=torch.cuda.current_device())  # the rows may be on the host
    counts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, mine, group)
    return group, [int(count) for count in counts]


def whole_tensor(tensor: Tensor, rows: RowSharding | None, dtype: torch.dtype, loading: bool) -> Tensor | None:
    """All rows of a tensor, on the host, or an empty tensor to load them into; None if another rank owns them.

    The ranks that shard it call this together.
    """
    if loading:
        return torch.empty(tensor.shape, dtype=dtype) if rows is None or rows.is_owner else None
    tensor = tensor.detach()
    if rows is None:
        return tensor.to(device="cpu", dtype=dtype)
    mine = _local(tensor)
    padded = mine.new_zeros(max(rows.counts), *tensor.shape[1:], device=torch.cuda.current_device())
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in rows.counts] if rows.is_owner else None
    dist.gather(padded, gathered, rows.owner_in_world, rows.group)
    if gathered is None:
        return None
    parts = [part[:count] for part, count in zip(gathered, rows.counts, strict=True)]
    return torch.cat(parts).to(device="cpu", dtype=dtype)


@torch.no_grad()
def copy_share(tensor: Tensor, whole: Tensor | None, rows: RowSharding | None) -> None:
    """Copy this rank's rows of `whole`, which only the owner has, to `tensor`. The ranks that shard it call it."""
    if rows is None:
        assert whole is not None
        tensor.copy_(whole)
        return
    mine = _local(tensor)
    received = mine.new_empty(max(rows.counts), *tensor.shape[1:], device=torch.cuda.current_device())
    sent = None
    if rows.is_owner:
        assert whole is not None
        sent = [torch.zeros_like(received) for _ in rows.counts]
        for padded, part in zip(sent, whole.split(rows.counts), strict=True):
            padded[: len(part)] = part
    dist.scatter(received, sent, rows.owner_in_world, rows.group)
    mine.copy_(received[: len(mine)])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
