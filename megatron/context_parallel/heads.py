"""Head parallelism around any plan (LoongTrain section 4.1, Algorithm 1): SeqAlltoAll, and replicated key/value heads.

The ranks of a head group swap (own chunk, all heads) for (the group's chunks, a part of the heads), run the plan's
steps with the ranks that have the same part, and swap back.
"""

import torch
from torch import Tensor

from .errors import UsageError
from .layout import rows_in
from .plan.ir import Plan
from .strategies import find_strategy
from .transport import Program, Subgroup, Transport


def head_parallel_sizes(heads: int, kv_heads: int) -> list[int]:
    """The head-parallel sizes that split the heads of a (tensor-parallel) rank, ascending."""
    return [d for d in range(1, heads + 1) if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)]


def check_heads(plan: Plan, heads: int, kv_heads: int) -> None:
    """Raises UsageError if the head-parallel size of `plan` does not split the heads, naming what would."""
    sizes = head_parallel_sizes(heads, kv_heads)
    if plan.heads not in sizes:
        fits = max(d for d in sizes if plan.size % d == 0)
        give = "--cp-strategy usp " if find_strategy(plan.name).all_heads else ""
        raise UsageError(
            f"--cp-head-parallel-size {plan.heads}: does not split {heads} heads with {kv_heads} key/value heads, as "
            f"{', '.join(map(str, sizes))} do; give {give}--cp-head-parallel-size {fits}"
        )


class HeadGroup:
    """One rank's place among the heads: whom it swaps with, and its rank in and transport to those with its part."""

    def __init__(self, plan: Plan, rank: int, length: int, transport: Transport) -> None:
        grid = plan.grid
        place = grid.coordinates(rank)
        self.part, self.context_rank = place["heads"], place["context"]
        self.members, self.transport = grid.along(rank, "heads"), transport
        self.context = Subgroup(transport, grid.along(rank, "context")) if plan.heads > 1 else transport
        chunks = [plan.chunk_of(member) for member in self.members]
        self.rows = [rows_in(plan.layout, c, self.context_rank, plan.n, plan.heads, length) for c in chunks]

    def to_heads(self, *tensors: Tensor) -> Program[list[Tensor]]:
        """[s, b, h, ...] of this rank's chunk to [s * size, b, h / size, ...] of the group's.

        Of fewer heads than ranks, each rank gets the one its queries read.
        """
        size = len(self.members)
        if size == 1:
            return list(tensors)
        sent = [[x[:, :, _heads(p, size, x.shape[2])].contiguous() for x in tensors] for p in range(size)]
        got = yield from self._swap(sent)
        joined = []
        for pieces in zip(*got, strict=True):
            whole = pieces[0].new_empty(len(pieces[0]) * size, *pieces[0].shape[1:])
            for piece, rows in zip(pieces, self.rows, strict=True):
                for own, where in rows:
                    whole[where] = piece[own]
            joined.append(whole)
        return joined

    def to_chunks(self, *tensors: Tensor) -> Program[list[Tensor]]:
        """Inverse of `to_heads`; of replicated heads, all replicas, side by side."""
        size = len(self.members)
        if size == 1:
            return list(tensors)
        sent = []
        for rows in self.rows:
            pieces = [x.new_empty(len(x) // size, *x.shape[1:]) for x in tensors]
            for x, piece in zip(tensors, pieces, strict=True):
                for own, where in rows:
                    piece[own] = x[where]
            sent.append(pieces)
        got = yield from self._swap(sent)
        return [torch.cat(pieces, 2) for pieces in zip(*got, strict=True)]

    def _swap(self, pieces: list[list[Tensor]]) -> Program[list[list[Tensor]]]:
        """Sends pieces[i] to member i and returns what each member sent here, all in one exchange."""
        got = [own if i == self.part else [x.new_empty(x.shape) for x in own] for i, own in enumerate(pieces)]
        others = [(i, peer) for i, peer in enumerate(self.members) if i != self.part]
        sends, receives = ([(peer, x) for i, peer in others for x in values[i]] for values in (pieces, got))
        yield self.transport.exchange("heads", sends, receives)
        return got


def _heads(part: int, size: int, heads: int) -> slice:
    first = part * heads // size
    return slice(first, max(first + 1, (part + 1) * heads // size))
