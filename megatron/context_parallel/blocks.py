"""The blocks of a distributed attention: the order of gathered key rows, and the pieces that a kernel computes."""

import torch
from torch import Tensor

from .kernels import Kernel
from .kernels.masks import Piece, Runs, runs
from .layout import Chunks
from .mask import Mask

Rows = tuple[int, slice, slice]  # chunk, rows of the chunk, and where they are among the gathered rows


class Blocks:
    """The blocks of a sequence under a mask. Each is cut into pieces once, for all layers and both passes.

    Args:
        q, kv: the chunks of queries and of keys.
        kernel: cuts blocks into what it computes.
    """

    def __init__(self, mask: Mask, q: Chunks, kv: Chunks, kernel: Kernel) -> None:
        self.mask, self.q, self.kv, self.kernel = mask, q, kv, kernel
        self._pieces: dict[tuple, list[Piece]] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._order: dict[tuple, tuple[Tensor, list[Rows]]] = {}

    def order(self, chunks: tuple[int, ...]) -> tuple[Tensor, list[Rows]]:
        """Positions of the rows of the key chunks, ascending, and where the rows of each chunk are among them."""
        if chunks not in self._order:
            all_positions = torch.cat([self.kv.positions(c) for c in chunks]).sort().values
            rows = []
            for chunk in chunks:
                start = 0
                for p in self.kv.progressions[chunk]:
                    first, second, last = torch.searchsorted(
                        all_positions, torch.tensor([p.start, p.start + (p.length > 1) * p.stride, p.last])
                    ).tolist()
                    own = slice(start, start + p.length)
                    rows.append((chunk, own, slice(first, last + 1, max(1, second - first))))
                    start += p.length
            self._order[chunks] = all_positions, rows
        return self._order[chunks]

    def runs(self, q_chunk: int, kv_chunks: tuple[int, ...]) -> Runs:
        """The rows of the gathered key chunks that each query of a chunk sees."""
        if q_chunk not in self._seen:
            self._seen[q_chunk] = self.mask.seen(self.q.positions(q_chunk))
        return runs(self._seen[q_chunk], self.order(kv_chunks)[0])

    def pieces(self, q_chunk: int, kv_chunks: tuple[int, ...]) -> list[Piece]:
        """The block of a query chunk against gathered key/value chunks, cut for the kernel."""
        key = q_chunk, kv_chunks
        if key not in self._pieces:
            block = self.runs(q_chunk, kv_chunks)
            seen = bool((block.end > block.first).any())
            self._pieces[key] = self.kernel.pieces(block, len(self.order(kv_chunks)[0])) if seen else []
        return self._pieces[key]
