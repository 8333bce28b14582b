"""The position kernel's forward pass for few query rows on the device (Triton): programs share the keys of a block.

A tile has the rows of all query heads that share a key/value head, so keys are read once for them: packed row
r = row * group + g. Each program sees a part of the keys. A second kernel merges the parts, always in the same order.
"""

import triton
import triton.language as tl

from .forward import LOWEST, attend
from .parts import LOG2_E, load_rows, scaled, store_rows, zeros
from .seen import seen_by


@triton.jit
def _load_packed(base, at, rows, g, D: tl.constexpr, E: tl.constexpr):
    """Rows of several heads, from head `g` of each row's own group."""
    rows = (rows.to(tl.int64) * at[0] + g.to(tl.int64) * at[2])[:, None]
    x = tl.load(base + rows + tl.arange(0, D)[None, :])
    parts = (x, tl.load(base + rows + D + tl.arange(0, E)[None, :])) if E > 0 else (x,)
    return parts


@triton.jit(do_not_specialize=["s", "t", "group", "heads_a_sample", "keys_a_part"])
def few_rows_kernel(
    q, k, v, out, lse, first, end, seen_keys, s, t, group, heads_a_sample, keys_a_part, scale, at_q, at_k, at_v,
    MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr,
    EV: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [parts, B, s * G, dv] and lse [parts, B, s * G] in float32: a tile of packed rows and a part of the keys."""
    part, head, packed = tl.program_id(0), tl.program_id(1), tl.program_id(2) * ROWS
    if MASK == "key_ranges":
        first += (head // heads_a_sample).to(tl.int64) * s
        end += (head // heads_a_sample).to(tl.int64) * s
        seen_keys += (head // heads_a_sample).to(tl.int64) * t
    local = tl.arange(0, ROWS)
    inside = packed + local < s * group
    place = tl.minimum(packed + local, s * group - 1)
    rows = place // group
    first_seen, end_seen = seen_by(rows, inside, first, end, t, MASK)
    lo, hi = part * keys_a_part, tl.minimum((part + 1) * keys_a_part, t)
    first_seen, end_seen = tl.maximum(first_seen, lo), tl.minimum(end_seen, hi)
    lo = tl.min(tl.where(first_seen < end_seen, first_seen, hi))
    hi = tl.max(tl.where(first_seen < end_seen, end_seen, lo))

    k += head.to(tl.int64) * at_k[1]
    v += head.to(tl.int64) * at_v[1]
    queries = _load_packed(q + head.to(tl.int64) * at_q[1], at_q, rows, place % group, D, E)
    state = (zeros(ROWS, DV, EV), tl.zeros([ROWS], tl.float32), tl.full([ROWS], LOWEST, tl.float32))
    for i in range(tl.cdiv(tl.maximum(hi - lo, 0), KEYS)):
        state = attend(
            state, queries, k, v, at_k, at_v, lo + i * KEYS, hi, first_seen, end_seen, seen_keys, scale,
            True, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, total, top = state
    unseen = total == 0
    acc = scaled(acc, (1 / tl.where(unseen, 1, total))[:, None], EV)
    row = (part * tl.num_programs(1) + head).to(tl.int64) * s * group + packed
    store_rows(out + row * (DV + EV), local, DV + EV, acc, inside, DV, EV)
    log = tl.where(unseen, float("-inf"), (top + tl.math.log2(total)) / LOG2_E)
    tl.store(lse + row + local, log, inside)


@triton.jit(do_not_specialize=["parts", "s", "heads", "group"])
def merge_parts_kernel(
    out, lse, out_of_parts, lse_of_parts, parts, s, heads, group, at_out, at_lse, at_parts, at_lse_of_parts,
    ROWS: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr,
):  # fmt: skip
    """out [s, B, G, dv] and lse [s, B, G] of the `parts`, which have the shapes of `few_rows_kernel`.

    The last arguments but the sizes are the strides from row to row, where all rows are in one line.
    """
    local = tl.arange(0, ROWS)
    packed = tl.program_id(0) * ROWS
    count = heads * s * group
    inside = packed + local < count
    at = tl.minimum(packed + local, count - 1).to(tl.int64)
    total, top = tl.zeros([ROWS], tl.float32), tl.full([ROWS], LOWEST, tl.float32)
    acc = zeros(ROWS, DV, EV)
    for part in range(parts):
        before = tl.cast(part, tl.int64) * count
        x = load_rows(out_of_parts + before * at_parts, at, at_parts, DV, EV)
        log = tl.load(lse_of_parts + (before + at) * at_lse_of_parts)
        new_top = tl.maximum(top, log)
        fade, weight = tl.exp(top - new_top), tl.exp(log - new_top)
        old, new = scaled(acc, fade[:, None], EV), scaled(x, weight[:, None], EV)
        acc = (old[0] + new[0], old[1] + new[1]) if EV > 0 else (old[0] + new[0],)
        total = total * fade + weight
        top = new_top
    unseen = total == 0
    acc = scaled(acc, (1 / tl.where(unseen, 1, total))[:, None], EV)
    head, row = at // (s * group), at // group % s
    place = (row * heads + head) * group + at % group
    store_rows(out, place, at_out, acc, inside, DV, EV)
    tl.store(lse + place * at_lse, tl.where(unseen, float("-inf"), top + tl.log(total)), inside)
