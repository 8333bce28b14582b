"""The position kernel's forward pass on the device (Triton): each query row sees one range of key rows."""

import triton
import triton.language as tl

from .parts import LOG2_E, add_outer, load_keys, load_rows, row_of, scaled, scores_of, store_rows, unit_of, zeros
from .seen import keys_of_tile, seen_by

LOWEST = tl.constexpr(-1e38)  # a running maximum before the first score: finite, so that no difference is NaN


@triton.jit
def weigh(scores, scale2, total, top):
    """Weights of a tile's scores, how much the weights before fade, and the new sum of weights and largest score."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale2)
    p = tl.math.exp2(scores * scale2 - new_top[:, None])
    fade = tl.math.exp2(top - new_top)
    return p, fade, total * fade + tl.sum(p, 1), new_top


@triton.jit
def attend(
    state, q, k, v, at_k, at_v, start, hi, first, end, seen_keys, scale,
    MASKED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile: `state` is the accumulated output, the sum of exponentials and the largest score of each row."""
    out, total, top = state
    local = tl.arange(0, KEYS)
    cols = start + local
    if MASKED:
        local = tl.minimum(local, hi - 1 - start)
    keys = load_rows(k + start.to(tl.int64) * at_k[0], local, at_k[0], D, E)
    scores, _ = scores_of(q, keys, scale, E, SOFTCAP, PRECISION)
    scale2 = unit_of(scale, SOFTCAP)
    if MASKED:
        seen = (cols[None, :] >= first[:, None]) & (cols[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    p, fade, total, top = weigh(scores, scale2, total, top)
    if MASKED:
        values = load_keys(v, start, local, at_v[0], seen_keys, DV, EV)
    else:
        values = load_rows(v + start.to(tl.int64) * at_v[0], local, at_v[0], DV, EV)
    out = add_outer(scaled(out, fade[:, None], EV), p.to(values[0].dtype), values, EV, PRECISION)
    return out, total, top


@triton.jit(do_not_specialize=["s", "t", "group", "heads_a_sample"])
def forward_kernel(
    q, k, v, out, lse, first, end, seen_keys, s, t, group, heads_a_sample, scale, at_q, at_k, at_v, at_out, at_lse,
    MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr,
    EV: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of query rows of one head. Tiles of late rows see the most keys and start first."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head, g = tl.program_id(1) // group, tl.program_id(1) % group
    if MASK == "key_ranges":
        first += (head // heads_a_sample).to(tl.int64) * s
        end += (head // heads_a_sample).to(tl.int64) * s
        seen_keys += (head // heads_a_sample).to(tl.int64) * t
    lo, hi, before, full, tiles = keys_of_tile(row, tl.minimum(row + ROWS, s) - 1, first, end, t, MASK, KEYS)

    local = tl.arange(0, ROWS)
    inside = row + local < s
    local = tl.minimum(local, s - 1 - row)
    k += head.to(tl.int64) * at_k[1]
    v += head.to(tl.int64) * at_v[1]
    queries = load_rows(row_of(q, at_q, row, head, g), local, at_q[0], D, E)
    first_seen, end_seen = seen_by(row + local, inside, first, end, t, MASK)
    state = (zeros(ROWS, DV, EV), tl.zeros([ROWS], tl.float32), tl.full([ROWS], LOWEST, tl.float32))
    for i in range(tiles - full):
        start = lo + (i + tl.where(i < before, 0, full)) * KEYS
        state = attend(
            state, queries, k, v, at_k, at_v, start, hi, first_seen, end_seen, seen_keys, scale,
            True, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
        )  # fmt: skip
    for i in range(before, before + full):
        start = lo + i * KEYS
        state = attend(
            state, queries, k, v, at_k, at_v, start, hi, first_seen, end_seen, seen_keys, scale,
            False, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, total, top = state
    unseen = total == 0
    acc = scaled(acc, (1 / tl.where(unseen, 1, total))[:, None], EV)
    store_rows(row_of(out, at_out, row, head, g), local, at_out[0], acc, inside, DV, EV)
    log = tl.where(unseen, float("-inf"), (top + tl.math.log2(total)) / LOG2_E)
    tl.store(row_of(lse, at_lse, row, head, g) + local * at_lse[0], log, inside)
