"""The rows of chunks that a rank has, computes with and sends: all of them, or those of `plan/row_sets.py`."""

import torch
from torch import Tensor

from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.plan.ir import Key, T
from megatron.context_parallel.plan.row_sets import RowSets
from megatron.context_parallel.tokens.slices import size_of

from .blocks import Blocks

Where = slice | Tensor | None  # of some rows among others; None: they are the same


class AllRows:
    """Whole chunks.

    Attributes:
        blocks: the blocks of the rows that the rank computes with.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def count(self, tensor: T, chunk: int) -> int:
        """The number of rows that the rank has of a chunk."""
        return self.blocks.chunks(tensor).rows[chunk]

    def received(self, tensor: T, chunk: int, peer: int) -> int:
        """The number of rows in a message from a peer."""
        return self.count(tensor, chunk)

    def where(self, key: Key, peer: int | None = None) -> Where:
        """The rows of a chunk in `blocks`, among those that the rank has.

        With a peer, the rows of an input that go to it, or of a partial that it sent.
        """
        return None


class SomeRows(AllRows):
    """Only the rows that the rank and those behind it need.

    Args:
        sets: the row sets of the plan.
        rank: among the ranks that run the steps together.
        blocks: those of whole chunks.
        device: of the tensors.
    """

    def __init__(self, sets: RowSets, rank: int, blocks: Blocks, device: torch.device) -> None:
        super().__init__(blocks.narrowed(*sets.chunks(rank)))
        self.sets, self.rank, self.device = sets, rank, device
        self._where: dict[tuple, Where] = {}

    def count(self, tensor: T, chunk: int) -> int:
        return size_of(self.sets.rows(self.rank, tensor, chunk))

    def received(self, tensor: T, chunk: int, peer: int) -> int:
        return self.sets.carried(tensor, chunk, peer, self.rank)

    def where(self, key: Key, peer: int | None = None) -> Where:
        if (key, peer) not in self._where:
            sets = self.sets
            inner = sets.in_blocks(self.rank, *key) if peer is None else sets.rows(peer, *key)
            indices = sets.indices(inner, sets.rows(self.rank, *key))
            if indices is None:
                where: Where = None
            elif len(indices) and indices[-1] - indices[0] == len(indices) - 1:
                where = slice(int(indices[0]), int(indices[-1]) + 1)
            else:
                where = to_device(torch.from_numpy(indices), self.device)
            self._where[key, peer] = where
        return self._where[key, peer]


def rows_of_rank(sets: RowSets | None, rank: int, blocks: Blocks, device: torch.device) -> AllRows:
    """The rows of one rank; made once for all layers whose blocks the same kernel cuts."""
    if sets is None:
        return AllRows(blocks)
    key = rank, device, blocks.kernel
    if key not in sets.of_ranks:
        sets.of_ranks[key] = SomeRows(sets, rank, blocks, device)
    return sets.of_ranks[key]
