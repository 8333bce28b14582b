"""The keys that query rows see, and the rows that see a tile of keys, in the position kernel's device code (Triton).

`MASK` is "full", "causal" or "key_ranges". `first` and `end` are read only for "key_ranges".
"""

import triton
import triton.language as tl

from .parts import load_numbers


@triton.jit
def seen_by(rows, inside, first, end, t, MASK: tl.constexpr, COPIES: tl.constexpr = 1):
    """The range of key rows that each of these query rows sees; empty for rows not `inside`."""
    if MASK == "key_ranges" and COPIES > 1:
        places = tl.where(inside, rows, 0)
        bounds = (load_numbers(first + places, COPIES), tl.where(inside, load_numbers(end + places, COPIES), 0))
    elif MASK == "key_ranges":
        bounds = (tl.load(first + rows, inside, 0), tl.load(end + rows, inside, 0))
    elif MASK == "causal":
        bounds = (rows * 0, tl.where(inside, rows + 1, 0))
    else:
        bounds = (rows * 0, tl.where(inside, t, 0))
    return bounds


@triton.jit
def _tiles(lo, full_lo, full_hi, hi, TILE: tl.constexpr):
    """Cuts lo..hi into tiles: the number before the full ones, the number of full ones, and the total."""
    hi = tl.maximum(hi, lo)
    before = tl.cdiv(tl.minimum(full_lo, hi) - lo, TILE)
    full = tl.maximum((full_hi - lo) // TILE - before, 0)
    return before, full, tl.cdiv(hi - lo, TILE)


@triton.jit
def keys_of_tile(row, last, first, end, t, MASK: tl.constexpr, KEYS: tl.constexpr):
    """The first key that rows `row` .. `last` see, the end of the last, and the tiles between."""
    lo, full_hi = seen_by(row, True, first, end, t, MASK)
    full_lo, hi = seen_by(last, True, first, end, t, MASK)
    before, full, tiles = _tiles(lo, full_lo, full_hi, hi, KEYS)
    return lo, hi, before, full, tiles


@triton.jit
def rows_of_tile(key, rows_seeing, tile, tiles, s, t, MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The first query row that sees any key of a tile from `key` on, the end of the last, and the tiles between."""
    if MASK == "key_ranges":
        lo, full_lo = tl.load(rows_seeing + tile), tl.load(rows_seeing + tiles + tile)
        full_hi, hi = tl.load(rows_seeing + 2 * tiles + tile), tl.load(rows_seeing + 3 * tiles + tile)
    elif MASK == "causal":
        lo, full_lo, full_hi, hi = key, key + KEYS - 1, s, s
    else:
        lo, full_lo, full_hi, hi = 0, tl.where(key + KEYS <= t, 0, s), s, s
    before, full, count = _tiles(lo, full_lo, full_hi, hi, ROWS)
    return lo, hi, before, full, count
