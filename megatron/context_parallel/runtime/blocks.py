"""The blocks of a distributed attention: the order of gathered key rows, and the pieces that a kernel computes."""

from collections.abc import Iterator
from itertools import chain, pairwise
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.kernels.masks import KeyRanges, Piece, PieceMask, of_each_sample
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.plan.ir import T
from megatron.context_parallel.tokens.documents import Documents, Sequences
from megatron.context_parallel.tokens.layout import Chunks, ListedChunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.slices import Slices

ALL = slice(None)  # in a piece: all rows of the chunk, or of the gathered keys
AnyChunks = Chunks | ListedChunks | Slices
GatheredRows = tuple[int, slice, slice | Tensor]  # chunk, rows of the chunk, and their indices among the gathered rows
RowSlice = slice | tuple[slice, slice]  # rows, or rows and heads
HeadPiece = tuple[RowSlice, RowSlice, PieceMask]  # of some heads: its queries, its keys, and which of them it sees


class Blocks:
    """The blocks of a sequence under a mask. Each is cut into pieces once, for all layers and both passes.

    Args:
        q, kv: the chunks of queries and of keys.
        kernel: cuts blocks into pieces.
        undivided: for a mask with documents, the blocks of the same mask without documents, which outlive the batch.
    """

    def __init__(
        self,
        mask: Mask,
        q: AnyChunks,
        kv: AnyChunks,
        kernel: Kernel,
        undivided: "Blocks | None" = None,
    ) -> None:
        self.mask, self.q, self.kv, self.kernel = mask, q, kv, kernel
        if isinstance(mask.documents, Documents):
            undivided = undivided or Blocks(Mask(mask.causal, mask.window), q, kv, kernel)
        self.undivided = undivided
        self._pieces: dict[tuple, list[Piece]] = {}
        self._head_pieces: dict[tuple, list[HeadPiece]] = {}
        self._narrowed: dict[tuple[bytes, ...], Blocks] = {}
        self._gather_order: dict[tuple, list[GatheredRows]] = {} if undivided is None else undivided._gather_order
        self._key_ranges: dict[tuple, KeyRanges] = {}
        self._edges: dict[int, list[np.ndarray]] = {}

    def narrowed(self, q: Slices, kv: Slices) -> "Blocks":
        """The same blocks of chunks without some rows that see, or are seen by, nothing in them.

        Both passes share them if they need the same rows.
        """
        key = tuple([chunk.tobytes() for chunk in (*q.of_chunks, *kv.of_chunks)])
        if key not in self._narrowed:
            self._narrowed[key] = Blocks(self.mask, q, kv, self.kernel)
        return self._narrowed[key]

    def chunks(self, tensor: T) -> AnyChunks:
        """The chunks in which a tensor is sent."""
        return self.kv if tensor in (T.KV, T.DKV) else self.q

    def key_rows(self, chunks: tuple[int, ...]) -> int:
        """The total number of rows of the key chunks."""
        return sum(self.kv.rows[chunk] for chunk in chunks)

    def gather_order(self, chunks: tuple[int, ...], device: torch.device) -> list[GatheredRows]:
        """The indices of each key chunk's rows among the rows of all of them, in ascending order of position.

        Tensors among them are on `device`. They are copied once, for all layers.
        """
        key = chunks, device
        if key not in self._gather_order:
            self._gather_order[key] = self._interleaved(chunks, device)
        return self._gather_order[key]

    def _interleaved(self, chunks: tuple[int, ...], device: torch.device) -> list[GatheredRows]:
        if not isinstance(self.kv, Chunks):
            listed: list[GatheredRows] = []
            for chunk in chunks:
                rows_of_chunk = self.kv.before(chunks, self.kv.positions(chunk).numpy())
                listed.append((chunk, slice(None), to_device(torch.from_numpy(rows_of_chunk).long(), device)))
            return listed
        ends = []
        for p in chain.from_iterable(self.kv.progressions[chunk] for chunk in chunks):
            ends.append((p.start, p.start + (p.length > 1) * p.stride, p.last))
        rows_of_ends = iter(self.kv.before(chunks, np.array(ends)).tolist())
        rows: list[tuple[int, GatheredRows]] = []
        for chunk in chunks:
            start = 0
            for p in self.kv.progressions[chunk]:
                first, second, last = next(rows_of_ends)
                own = slice(start, start + p.length)
                rows.append((first, (chunk, own, slice(first, last + 1, max(1, second - first)))))
                start += p.length
        return [row for _, row in sorted(rows, key=itemgetter(0))]

    def key_ranges(self, q_chunk: int, kv_chunks: tuple[int, ...]) -> KeyRanges:
        """The rows of the gathered key chunks that each query of a chunk sees."""
        key = q_chunk, kv_chunks
        if self.undivided is not None:
            return self._divided(self.undivided.key_ranges(*key), *key)
        if key not in self._key_ranges:
            seen = self.mask.seen(self.q.positions(q_chunk))
            self._key_ranges[key] = KeyRanges(
                *(torch.from_numpy(self.kv.before(kv_chunks, bound.numpy())) for bound in seen)
            )
        return self._key_ranges[key]

    def _divided(self, undivided: KeyRanges, q_chunk: int, kv_chunks: tuple[int, ...]) -> KeyRanges:
        """Ranges that end where documents do. Rows and positions both ascend, so only the edges are searched."""
        documents = self.mask.documents
        bounds = [bound[0].numpy() for bound in undivided]
        assert isinstance(documents, Documents)  # the only kind that divides blocks here
        if q_chunk not in self._edges:
            self._edges[q_chunk] = [self.q.before((q_chunk,), edges) for edges in documents.edges]
        of_samples = []
        for edges, inside, rows in zip(documents.edges, documents.inside, self._edges[q_chunk], strict=True):
            keys = self.kv.before(kv_chunks, edges)
            count = np.diff(rows)
            first, end = np.repeat(keys[:-1], count), bounds[1]
            if bounds[0][-1] > first[0]:  # both ascend
                np.maximum(bounds[0], first, out=first)
            if not (self.mask.causal and inside.all()):  # a causal range ends in its document
                end = np.minimum(end, np.repeat(keys[1:], count))
            for gap in np.flatnonzero(~inside & (count > 0)):
                in_gap = slice(*rows[gap : gap + 2])
                positions = self.q.positions(q_chunk)[in_gap].numpy()
                first[in_gap] = end[in_gap] = self.kv.before(kv_chunks, positions)
            of_samples.append((first, end))
        if len(of_samples) == 1:
            return KeyRanges(*(torch.from_numpy(x).unsqueeze(0) for x in of_samples[0]))
        return KeyRanges(*(torch.from_numpy(np.stack(x)) for x in zip(*of_samples, strict=True)))

    def pieces(self, q_chunk: int, kv_chunks: tuple[int, ...]) -> list[Piece]:
        """The block of a query chunk against gathered key/value chunks, cut for the kernel."""
        key = q_chunk, kv_chunks
        if key not in self._pieces:
            if isinstance(self.mask.documents, Sequences):
                self._pieces[key] = self._of_sequences(q_chunk, kv_chunks)
            else:
                rows, keys = self.q.rows[q_chunk], self.key_rows(kv_chunks)
                cut = self._kernel_pieces(self.key_ranges(*key), keys) if rows and keys else []
                self._pieces[key] = [p._replace(q=_all_or(p.q, rows), kv=_all_or(p.kv, keys)) for p in cut]
        return self._pieces[key]

    def pieces_of_heads(
        self, q_chunk: int, kv_chunks: tuple[int, ...], heads: tuple[float, float], count: int
    ) -> list[HeadPiece]:
        """The same pieces for a part of `count` heads (of all samples, sorted by sample), as `Attend.heads` gives it.

        A piece of one sample has the heads of its sample only.
        """
        key = q_chunk, kv_chunks, heads, count
        if key not in self._head_pieces:
            first, end = [int(count * share + 0.5) for share in heads]
            self._head_pieces[key] = [*self._split_by_heads(self.pieces(q_chunk, kv_chunks), range(first, end), count)]
        return self._head_pieces[key]

    def _split_by_heads(self, pieces: list[Piece], heads: range, count: int) -> Iterator[HeadPiece]:
        if len(heads) == count and all([piece.sample is None for piece in pieces]):
            yield from [(piece.q, piece.kv, piece.mask) for piece in pieces]
            return
        for piece in of_each_sample(pieces):  # a part of the heads is not a part of each sample
            first, end = heads.start, heads.stop
            if piece.sample is not None:
                assert self.mask.documents is not None  # only documents have pieces of a single sample
                per_sample = count // self.mask.documents.shape[0]
                first, end = max(first, piece.sample * per_sample), min(end, (piece.sample + 1) * per_sample)
            if first < end:
                yield (piece.q, slice(first, end)), (piece.kv, slice(first, end)), piece.mask

    def _of_sequences(self, q_chunk: int, kv_chunks: tuple[int, ...]) -> list[Piece]:
        """The pieces of a block, each within one sequence."""
        assert isinstance(self.q, ListedChunks) and isinstance(self.kv, ListedChunks)  # required for sequences
        rows, keys = pairwise(self.q.edges((q_chunk,))), pairwise(self.kv.edges(kv_chunks))
        pieces = []
        for of_rows, of_keys in zip(rows, keys, strict=True):
            pieces += self._of_sequence((q_chunk, kv_chunks), slice(*of_rows), slice(*of_keys))
        return pieces

    def _of_sequence(self, key: tuple[int, tuple[int, ...]], rows: slice, keys: slice) -> list[Piece]:
        """The pieces of a sequence's rows and keys, as rows and keys of the whole block."""
        count = keys.stop - keys.start
        if self.mask.causal or self.mask.window != (-1, -1):
            cut = self._kernel_pieces(self.key_ranges(*key).of(rows, keys), count)
        elif rows.start < rows.stop and count:
            seen = (torch.full((1, rows.stop - rows.start), x, dtype=torch.int32) for x in (0, count))
            cut = self.kernel.pieces(KeyRanges(*seen), count)
        else:
            cut = []
        return [Piece(_moved(p.q, rows.start), _moved(p.kv, keys.start), p.mask, p.sample) for p in cut]

    def _kernel_pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        return self.kernel.pieces(block, keys) if np.greater(block.end.numpy(), block.first.numpy()).any() else []


def _all_or(rows: slice, count: int) -> slice:
    return ALL if range(*rows.indices(count)) == range(count) else rows


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by, rows.step)
