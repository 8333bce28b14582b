"""Tensors that ranks shard, as the whole tensors of a checkpoint.

Checkpoints hold whole tensors, so a run with another kind of sharding can resume from them. Each tensor is whole on one
rank only, its owner, which writes and reads it. The owners have about as many numbers each, so a rank's host memory
holds one part of a checkpoint.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from torch import Tensor
from torch.distributed.tensor import DTensor


class Shares(NamedTuple):
    """The ranks that shard a weight. Each has neighbouring numbers of the flattened weight, in the order of the ranks.

    Attributes:
        counts: how many numbers each rank of `group` has.
        owner: the rank of `group` that has the whole tensors of the weight while a checkpoint is saved or loaded.
    """

    group: dist.ProcessGroup
    counts: list[int]
    owner: int

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""
        return dist.get_rank(self.group) == self.owner

    def owned(self, entry: ShardedBase, **changes: Any) -> ShardedBase:
        """The owner's entry."""
        return replace(entry, replica_id=self._replica(entry), **changes)

    def writes(self, entry: ShardedBase) -> bool:
        """Whether the owner writes the weight: of several groups that shard it alike, the first one."""
        return not any(self._replica(entry))

    def _replica(self, entry: ShardedBase) -> tuple[int, ...]:
        *others, rank = entry.replica_id  # data- and context-parallel ranks are neighbours
        return *others, rank // len(self.counts)


class Shard(NamedTuple):
    """This rank's numbers of a tensor: all of them if `shares` is None.

    Attributes:
        numbers: on the device or the host, of any shape; written to when a checkpoint is loaded.
        shape: that of the whole tensor.
        written: whether the owner writes it.
    """

    numbers: Tensor
    shape: torch.Size
    shares: Shares | None
    written: bool


def shard_of(numbers: Tensor, entry: ShardedBase, shape: torch.Size, shares: Shares | None) -> Shard:
    """This rank's numbers of a tensor with `entry` in checkpoints."""
    return Shard(numbers, shape, shares, shares is None or shares.writes(entry))


def shares_of(counts: Sequence[tuple[dist.ProcessGroup, int]]) -> list[Shares]:
    """How weights are sharded, from the group that shards each and how many numbers of it this rank has.

    All ranks of the groups call it, with the same weights.
    """
    in_group = defaultdict[dist.ProcessGroup, list[int]](list)
    for index, (group, _) in enumerate(counts):
        in_group[group].append(index)
    found: dict[int, Shares] = {}
    for group, indices in in_group.items():
        mine = torch.tensor([counts[index][1] for index in indices], device=torch.cuda.current_device())
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, mine, group)
        owned = [0] * len(of_ranks)
        of_weights = zip(indices, torch.stack(of_ranks, dim=1).tolist(), strict=True)
        for index, of_weight in sorted(of_weights, key=lambda weight: -sum(weight[1])):  # large ones first, for balance
            owner = min(range(len(owned)), key=owned.__getitem__)
            owned[owner] += sum(of_weight)
            found[index] = Shares(group, of_weight, owner)
    return [found[index] for index in range(len(counts))]


def whole_tensors(shards: Sequence[Shard], dtype: torch.dtype, loading: bool) -> list[Tensor | None]:
    """Each tensor whole, on the host, or an empty tensor to load it into; None if another rank owns or writes it.

    All ranks that shard the tensors call it. What each rank has whole stays where it is: the writer copies to the host
    what this rank writes.
    """
    whole: list[Tensor | None] = [None] * len(shards)
    for index, shard in enumerate(shards):
        if shard.shares is None and not loading:
            whole[index] = shard.numbers.detach().to(dtype)
        elif loading and (shard.shares is None or shard.shares.is_owner):
            whole[index] = torch.empty(shard.shape, dtype=dtype)
    written = [index for index, shard in enumerate(shards) if shard.written]
    for exchange in [] if loading else _exchanges(shards, written):
        device = torch.cuda.current_device()  # some may be on the host
        numbers = [_local(shards[index].numbers).to(device, dtype) for index in exchange.shards]
        received = exchange.to_owners(torch.cat(numbers))
        if exchange.own is not None:
            whole[exchange.own] = received.view(shards[exchange.own].shape).cpu()
    return whole


@torch.no_grad()
def copy_shares(shards: Sequence[Shard], whole: Sequence[Tensor | None], dtype: torch.dtype) -> None:
    """Copy this rank's numbers of each tensor of `whole`, which only owners have, to the shards.

    All ranks that shard the tensors call it. `dtype` is that of `whole`.
    """
    for shard, tensor in zip(shards, whole, strict=True):
        if shard.shares is None:
            assert tensor is not None
            shard.numbers.copy_(tensor)
    for exchange in _exchanges(shards, range(len(shards))):
        own = None if exchange.own is None else whole[exchange.own]
        own_numbers = torch.empty(0, dtype=dtype) if own is None else own.flatten()
        received = exchange.from_owners(own_numbers.to(torch.cuda.current_device()))
        targets = [_local(shards[index].numbers) for index in exchange.shards]
        for target, numbers in zip(targets, received.split([len(target) for target in targets]), strict=True):
            target.copy_(numbers)


class _Exchange:
    """One all-to-all between the ranks of a group and the owners of some tensors, at most one of each owner.

    Attributes:
        shards: the indices of the tensors, in the order of their owners.
        own: the index of the tensor that this rank owns, or None.
    """

    def __init__(self, shards: Sequence[Shard], of_owner: dict[int, int]) -> None:
        shares: dict[int, Shares] = {}
        for owner in sorted(of_owner):
            of_tensor = shards[of_owner[owner]].shares
            assert of_tensor is not None
            shares[owner] = of_tensor
            self._group = of_tensor.group
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.shards = [of_owner[owner] for owner in shares]
        self.own = of_owner.get(rank)
        self._for_owners = [shares[owner].counts[rank] if owner in shares else 0 for owner in range(size)]
        self._of_ranks = shares[rank].counts if rank in shares else [0] * size

    def to_owners(self, numbers: Tensor) -> Tensor:
        """Send this rank's numbers of each tensor to its owner. Returns all numbers of this rank's own tensor."""
        return self._all_to_all(numbers, self._for_owners, self._of_ranks)

    def from_owners(self, numbers: Tensor) -> Tensor:
        """Send the numbers of this rank's own tensor to the ranks that share it. Returns this rank's of each tensor."""
        return self._all_to_all(numbers, self._of_ranks, self._for_owners)

    def _all_to_all(self, numbers: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        received = numbers.new_empty(sum(receives))
        dist.all_to_all_single(received, numbers, receives, sends, self._group)
        return received


def _exchanges(shards: Sequence[Shard], indices: Sequence[int]) -> list[_Exchange]:
    """Those that move these tensors, if they are sharded, one group after the other: a rank can be in several."""
    in_group = defaultdict[dist.ProcessGroup, list[dict[int, int]]](list)
    for index in indices:
        shard = shards[index]
        if shard.shares is None:
            continue
        rounds = in_group[shard.shares.group]
        free = next((of_owner for of_owner in rounds if shard.shares.owner not in of_owner), None)
        if free is None:
            free = {}
            rounds.append(free)
        free[shard.shares.owner] = index
    return [_Exchange(shards, of_owner) for rounds in in_group.values() for of_owner in rounds]


def _local(tensor: Tensor) -> Tensor:
    """This rank's numbers of a tensor, in one dimension, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)
