"""Cuts a masked block into pieces that ordinary flash kernels compute: full rectangles and causal squares.

Queries and keys come as progressions of positions. Two progressions of one stride see each other along a shifted
diagonal, which splits into full rectangles and one causal square; so plain kernels cover every layout.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..errors import UsageError
from ..layout import Progression


class Piece(NamedTuple):
    """Rows of the queries against rows of the keys, all visible or (`causal`) query i seeing keys 0..i."""

    q: slice
    kv: slice
    causal: bool


def pieces(q: Iterable[Progression], kv: Iterable[Progression], causal: bool) -> list[Piece]:
    """Pieces of the block (queries at `q`) × (keys at `kv`); rows are numbered in the order of the progressions.

    Every row of a piece sees at least one key, so no kernel ever meets a fully masked row.

    Raises:
        UsageError: progressions of different strides under a causal mask (a step-shaped mask).
    """
    q, kv = list(q), list(kv)
    q_rows, kv_rows = sum(p.length for p in q), sum(p.length for p in kv)
    if not causal:
        return [Piece(slice(0, q_rows), slice(0, kv_rows), False)]
    found = []
    for q_start, queries in _offsets(q):
        row = [
            Piece(_shift(piece.q, q_start), _shift(piece.kv, kv_start), piece.causal)
            for kv_start, keys in _offsets(kv)
            for piece in _pair(queries, keys)
        ]
        found += _join_keys(row)
    return _join_queries(found)


def _pair(q: Progression, kv: Progression) -> Iterator[Piece]:
    if kv.last <= q.start:
        yield Piece(slice(0, q.length), slice(0, kv.length), False)
        return
    if kv.start > q.last:
        return
    if q.stride != kv.stride:
        raise UsageError(f"no plain kernel for a causal block of positions {q} against {kv}: strides differ")
    ahead = (q.start - kv.start) // q.stride  # query i sees keys 0 .. i + ahead
    first = max(0, -ahead)  # queries before it see nothing
    ahead = max(0, ahead)  # keys before it are seen by all the others
    side = min(q.length - first, kv.length - ahead)
    if ahead:
        yield Piece(slice(first, q.length), slice(0, ahead), False)
    yield Piece(slice(first, first + side), slice(ahead, ahead + side), True)
    if first + side < q.length:
        yield Piece(slice(first + side, q.length), slice(ahead, ahead + side), False)


def _offsets(progressions: list[Progression]) -> Iterator[tuple[int, Progression]]:
    offset = 0
    for p in progressions:
        yield offset, p
        offset += p.length


def _shift(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def _join_keys(row: list[Piece]) -> list[Piece]:
    """Joins full pieces of the same queries whose keys are stored side by side."""
    joined: list[Piece] = []
    for piece in sorted(row, key=lambda p: (p.causal, p.q.start, p.q.stop, p.kv.start)):
        last = joined[-1] if joined else None
        if last and not piece.causal and not last.causal and last.q == piece.q and last.kv.stop == piece.kv.start:
            joined[-1] = Piece(last.q, slice(last.kv.start, piece.kv.stop), False)
        else:
            joined.append(piece)
    return joined


def _join_queries(found: list[Piece]) -> list[Piece]:
    """Joins full pieces of the same keys whose queries are stored side by side."""
    joined: list[Piece] = []
    for piece in found:
        for i, other in enumerate(joined):
            if not (piece.causal or other.causal) and other.kv == piece.kv and other.q.stop == piece.q.start:
                joined[i] = Piece(slice(other.q.start, piece.q.stop), piece.kv, False)
                break
        else:
            joined.append(piece)
    return joined
