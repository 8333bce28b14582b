"""Attention of DTensors that are sharded along the sequence, through their local parts."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.distributed import get_process_group_ranks as ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.ir import CONTEXT_FIRST, HEAD_FIRST
from megatron.context_parallel.tokens.documents import Documents, placement_of

from .context import AllRanks, ContextParallel


def local_parts(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cp: ContextParallel | AllRanks, sequence: int
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor] | None]:
    """The local parts of q, k and v, and a function that wraps a local result like q; None if there are no DTensors.

    Args:
        sequence: the sequence dimension.

    Raises:
        UsageError: sinks are a DTensor; q, k and v are not all DTensors with one mesh and placement; they are not
            sharded only along the sequence and by the context group; the shards are unequal.
    """
    if isinstance(sinks, DTensor):
        raise UsageError("sinks: a DTensor; give the whole tensor, such as sinks.full_tensor()")
    if not any(isinstance(x, DTensor) for x in (q, k, v)):
        return q, k, v, None
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        raise UsageError("q, k, v: some are DTensors and some are not; give all of one kind, such as q.to_local()")
    mesh, placements = q.device_mesh, q.placements
    if not (mesh == k.device_mesh == v.device_mesh and placements == k.placements == v.placements):
        raise UsageError(f"q, k, v placed {placements}, {k.placements}, {v.placements}: need one mesh and placement")
    by = [i for i, placement in enumerate(placements) if placement.is_shard(sequence)]
    odd = any(not isinstance(x, Shard | Replicate) or x.is_shard(3) or x.is_shard(-1) for x in placements)
    if isinstance(cp, AllRanks) or odd or len(by) != 1 or ranks_of(mesh.get_group(by[0])) != ranks_of(cp.group):
        raise UsageError(
            f"q, k, v are DTensors placed {placements}: they must be sharded along dimension {sequence}, the sequence, "
            "by the context group only; redistribute them, or give q.to_local()"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        for i, placement in enumerate(placements):
            if isinstance(placement, Shard) and x.shape[placement.dim] % mesh.size(i):
                raise UsageError(
                    f"{name} {list(x.shape)}: a DTensor whose dimension {placement.dim} has unequal shards on "
                    f"{mesh.size(i)} ranks; give a multiple, or {name}.to_local()"
                )
    placed = partial(DTensor.from_local, device_mesh=mesh, placements=placements, run_check=False)
    return q.to_local(), k.to_local(), v.to_local(), placed


def check_tokens(cp: ContextParallel | AllRanks, documents: Documents | None) -> None:
    """Raises UsageError unless rank r has the r-th of equal slices of the sequence."""
    local = "or q.to_local() with tokens in the order of cp.positions"
    if placement_of(documents):
        raise UsageError(
            f"documents with a placement: DTensors have contiguous shards; give documents without one, {local}"
        )
    if cp.layout != "contiguous" and cp.n > 1:
        raise UsageError(f"--cp-layout {cp.layout}: DTensors have contiguous shards; give contiguous, {local}")
    if not cp.in_rank_order:
        raise UsageError(
            f"--cp-placement {CONTEXT_FIRST}: DTensors have their shards in the order of the ranks; give "
            f"{HEAD_FIRST}, {local}"
        )
