"""The blocks of a distributed attention: the order of gathered key rows, and the pieces that a kernel computes."""

import torch
from torch import Tensor

from .kernels import Kernel
from .kernels.masks import Piece, Runs, runs
from .layout import Chunks, ListedChunks
from .mask import Mask, Sequences
from .plan.ir import T

Rows = tuple[int, slice, slice | Tensor]  # chunk, rows of the chunk, and where they are among the gathered rows


class Blocks:
    """The blocks of a sequence under a mask. Each is cut into pieces once, for all layers and both passes.

    Args:
        q, kv: the chunks of queries and of keys.
        kernel: cuts blocks into what it computes.
    """

    def __init__(self, mask: Mask, q: Chunks | ListedChunks, kv: Chunks | ListedChunks, kernel: Kernel) -> None:
        self.mask, self.q, self.kv, self.kernel = mask, q, kv, kernel
        self._pieces: dict[tuple, list[Piece]] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._order: dict[tuple, tuple[Tensor, list[Rows]]] = {}

    def chunks(self, tensor: T) -> Chunks | ListedChunks:
        """The chunks in which a tensor travels."""
        return self.kv if tensor in (T.KV, T.DKV) else self.q

    def order(self, chunks: tuple[int, ...]) -> tuple[Tensor, list[Rows]]:
        """Positions int64 of the rows of the key chunks, ascending, and where the rows of each chunk are among them."""
        if chunks not in self._order:
            self._order[chunks] = self._interleaved(chunks)
        return self._order[chunks]

    def _interleaved(self, chunks: tuple[int, ...]) -> tuple[Tensor, list[Rows]]:
        if len(chunks) == 1:
            return self.kv.positions(chunks[0]), [(chunks[0], slice(None), slice(None))]
        of_chunks = [self.kv.positions(c) for c in chunks]
        all_positions = torch.cat(of_chunks).sort().values
        if isinstance(self.kv, ListedChunks):
            found = (torch.searchsorted(all_positions, x) for x in of_chunks)
            return all_positions, [(c, slice(None), where) for c, where in zip(chunks, found, strict=True)]
        rows: list[Rows] = []
        for chunk in chunks:
            start = 0
            for p in self.kv.progressions[chunk]:
                first, second, last = torch.searchsorted(
                    all_positions, torch.tensor([p.start, p.start + (p.length > 1) * p.stride, p.last])
                ).tolist()
                own = slice(start, start + p.length)
                rows.append((chunk, own, slice(first, last + 1, max(1, second - first))))
                start += p.length
        return all_positions, rows

    def runs(self, q_chunk: int, kv_chunks: tuple[int, ...]) -> Runs:
        """The rows of the gathered key chunks that each query of a chunk sees."""
        if q_chunk not in self._seen:
            self._seen[q_chunk] = self.mask.seen(self.q.positions(q_chunk))
        return runs(self._seen[q_chunk], self.order(kv_chunks)[0])

    def pieces(self, q_chunk: int, kv_chunks: tuple[int, ...]) -> list[Piece]:
        """The block of a query chunk against gathered key/value chunks, cut for the kernel."""
        key = q_chunk, kv_chunks
        if key not in self._pieces:
            block, keys = self.runs(q_chunk, kv_chunks), self.order(kv_chunks)[0]
            sequences = self.mask.documents
            if isinstance(sequences, Sequences):
                parts = sequences.cut(self.q.positions(q_chunk), keys)
                self._pieces[key] = [p for q, kv in parts for p in self._shifted(block.of(q, kv), q.start, kv)]
            else:
                self._pieces[key] = self._cut(block, len(keys))
        return self._pieces[key]

    def _cut(self, block: Runs, keys: int) -> list[Piece]:
        return self.kernel.pieces(block, keys) if bool((block.end > block.first).any()) else []

    def _shifted(self, block: Runs, first: int, keys: slice) -> list[Piece]:
        """The pieces of a part of a block, from its rows and keys to those of the whole block."""
        return [
            piece._replace(q=_moved(piece.q, first), kv=_moved(piece.kv, keys.start))
            for piece in self._cut(block, keys.stop - keys.start)
        ]


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by, rows.step)
