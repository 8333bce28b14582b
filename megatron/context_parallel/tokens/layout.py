"""The token positions of each chunk of a sequence.

A sequence of `length` tokens is cut into `n` chunks, one for each rank of the context group. A chunk is a union of
arithmetic progressions of positions. All code that depends on positions (data, RoPE, masks, gathering) uses this
module. No other module depends on the name of a layout.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

from megatron.context_parallel.errors import UsageError

if TYPE_CHECKING:  # flags need the names of the layouts, but not torch
    import numpy as np
    from torch import Tensor


class Progression(NamedTuple):
    """The positions start, start + stride, ..., `length` of them."""

    start: int
    stride: int
    length: int

    @property
    def last(self) -> int:
        return self.start + (self.length - 1) * self.stride


def _contiguous(chunk: int, n: int, size: int) -> tuple[Progression, ...]:
    return (Progression(chunk * size, 1, size),)


def _zigzag(chunk: int, n: int, size: int) -> tuple[Progression, ...]:
    half = size // 2
    return Progression(chunk * half, 1, half), Progression((2 * n - 1 - chunk) * half, 1, half)


def _cyclic(chunk: int, n: int, size: int) -> tuple[Progression, ...]:
    return (Progression(chunk, n, size),)


_PROGRESSIONS = {"contiguous": _contiguous, "zigzag": _zigzag, "cyclic": _cyclic}
LAYOUTS = tuple(_PROGRESSIONS)


def granularity(layout: str) -> int:
    """A sequence over n ranks must have a multiple of n times so many tokens."""
    return 2 if layout == "zigzag" else 1


@lru_cache(4096)
def progressions(layout: str, chunk: int, n: int, length: int) -> tuple[Progression, ...]:
    """The positions of `chunk` (of `n`) in a sequence of `length` tokens, in local order.

    `contiguous` is chunk i of n; `zigzag` is slices i and 2n-1-i of 2n; `cyclic` is i, i+n, i+2n, ... (striped).

    Raises:
        UsageError: unknown layout, or `length` not a multiple of n (of 2n for zigzag).
    """
    if layout not in _PROGRESSIONS:
        raise UsageError(f"--cp-layout {layout}: unknown; choose one of {', '.join(LAYOUTS)}")
    parts = n * granularity(layout)
    if length % parts or length < parts:
        nearest = max(parts, length // parts * parts)
        raise UsageError(
            f"--seq-length {length}: the {layout} layout over {n} ranks needs a multiple of {parts}, such as {nearest}"
        )
    return _PROGRESSIONS[layout](chunk, n, length // n)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a sequence as data: the positions each holds, ascending.

    Attributes:
        progressions: the progressions of each chunk.
    """

    progressions: tuple[tuple[Progression, ...], ...]

    @classmethod
    def of(cls, layout: str, n: int, length: int) -> "Chunks":
        """The n chunks of `length` tokens. Raises UsageError like `progressions`."""
        return cls(tuple(progressions(layout, chunk, n, length) for chunk in range(n)))

    @classmethod
    def pair(cls, layout: str, n: int, length: int, kv_length: int | None = None) -> tuple["Chunks", "Chunks"]:
        """The chunks of `length` queries and `kv_length` (default: as many) keys. The last ones share a position."""
        if kv_length in (None, length):
            return (cls.of(layout, n, length),) * 2
        return cls.of(layout, n, length)._shifted(kv_length - length), cls.of(layout, n, kv_length)

    def _shifted(self, by: int) -> "Chunks":
        shifted = []
        for chunk in self.progressions:
            shifted.append(tuple(p._replace(start=p.start + by) for p in chunk))
        return Chunks(tuple(shifted))

    @property
    def n(self) -> int:
        return len(self.progressions)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of tokens of each chunk."""
        rows = []
        for chunk in self.progressions:
            rows.append(sum(p.length for p in chunk))
        return tuple(rows)

    def positions(self, chunk: int) -> "Tensor":
        """The positions of `chunk`, int64 [rows], in the order its rank stores its tokens."""
        import torch

        return torch.cat([torch.arange(p.start, p.last + 1, p.stride) for p in self.progressions[chunk]])

    def before(self, chunks: "Iterable[int]", bounds: "np.ndarray") -> "np.ndarray":
        """The number of rows of `chunks` with a position below each of `bounds` (int64): int32."""
        import numpy as np

        total = np.zeros(bounds.shape, np.int32)
        for chunk in chunks:
            for start, stride, length in self.progressions[chunk]:
                total += ((bounds - (start - stride + 1)) // stride).clip(0, length).astype(np.int32)
        return total


@dataclass(frozen=True)
class ListedChunks:
    """Chunks of concatenated sequences, with any number of rows of each, including none.

    Attributes:
        of_sequences: for each chunk, the rows of each sequence.
        positions: returns the positions of a chunk, int64 [rows], ascending.
    """

    of_sequences: tuple[tuple[int, ...], ...]
    positions: "Callable[[int], Tensor]"
    _gathered: "dict[tuple[int, ...], np.ndarray]" = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def n(self) -> int:
        return len(self.of_sequences)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of tokens of each chunk."""
        return tuple(map(sum, self.of_sequences))

    def edges(self, chunks: tuple[int, ...]) -> list[int]:
        """The start of each sequence among the rows of `chunks`, and the end of the last one."""
        together = zip(*(self.of_sequences[chunk] for chunk in chunks), strict=True)
        return [*accumulate(map(sum, together), initial=0)]

    def before(self, chunks: "tuple[int, ...]", bounds: "np.ndarray") -> "np.ndarray":
        """As `Chunks.before`."""
        import numpy as np

        if chunks not in self._gathered:
            self._gathered[chunks] = np.sort(np.concatenate([self.positions(chunk).numpy() for chunk in chunks]))
        return np.searchsorted(self._gathered[chunks], bounds).astype(np.int32)


def positions(layout: str, chunk: int, n: int, length: int) -> "Tensor":
    """The positions of `chunk` as int64 [length / n], in the order its rank stores its tokens.

    Raises:
        UsageError: as `progressions`, or the length is not an integer.
    """
    if not isinstance(length, Integral) or isinstance(length, bool):
        raise UsageError(f"length of type {type(length).__name__}: need a whole number of tokens, such as 4096")
    return Chunks((progressions(layout, chunk, n, length),)).positions(0)


def shard(x: "Tensor", layout: str, chunk: int, n: int, dim: int = 0) -> "Tensor":
    """The tokens of `chunk` out of a full sequence: [..., length, ...] to [..., length / n, ...] along `dim`.

    It is a view if the layout allows it.

    Raises:
        UsageError: as `progressions`, or `x` is not a tensor or lacks the dimension.
    """
    import torch

    dim = _dimension(x, dim)
    rows = [x[_rows(p, dim)] for p in progressions(layout, chunk, n, x.shape[dim])]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim)


def unshard(chunks: "list[Tensor]", layout: str, dim: int = 0) -> "Tensor":
    """Inverse of `shard`: the full sequence from the chunks of all ranks, in chunk order."""
    n = len(chunks)
    shape = list(chunks[0].shape)
    dim = _dimension(chunks[0], dim)
    shape[dim] *= n
    whole = chunks[0].new_empty(shape)
    for i, chunk in enumerate(chunks):
        cut = progressions(layout, i, n, shape[dim])
        for p, rows in zip(cut, chunk.split([p.length for p in cut], dim), strict=True):
            whole[_rows(p, dim)] = rows
    return whole


def _dimension(x: "Tensor", dim: int) -> int:
    """`dim` counted from the front."""
    import torch

    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested:
        raise UsageError(f"a sequence of type {type(x).__name__}: need a dense tensor")
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise UsageError(f"dim {dim!r}: need one of the {x.dim()} dimensions of {list(x.shape)}, such as 0")
    return dim % x.dim()


def _rows(p: Progression, dim: int) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(p.start, p.last + 1, p.stride),)


def parts(layout: str, chunk: int, n: int, count: int) -> tuple[int, ...]:
    """The `count` small chunks (of n * count) whose union is `chunk` (of n)."""
    return tuple(range(chunk, n * count, n)) if layout == "cyclic" else tuple(range(chunk * count, (chunk + 1) * count))


@lru_cache(4096)
def rows_in(layout: str, part: int, chunk: int, n: int, count: int, length: int) -> tuple[tuple[slice, slice], ...]:
    """The location of the tokens of `part` (of n * count) in `chunk` (of n): (rows of the part, rows of the chunk)."""
    found = []
    offset = 0
    for p in progressions(layout, part, n * count, length):
        start = 0
        for whole in progressions(layout, chunk, n, length):
            if whole.start <= p.start <= whole.last and (p.start - whole.start) % whole.stride == 0:
                step = p.stride // whole.stride
                first = start + (p.start - whole.start) // whole.stride
                rows = slice(first, first + (p.length - 1) * step + 1, step)
                found.append((slice(offset, offset + p.length), rows))
            start += whole.length
        offset += p.length
    return tuple(found)
