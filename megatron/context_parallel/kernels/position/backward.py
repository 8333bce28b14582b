"""The position kernel's backward pass on the device (Triton): dq by query tile, dk and dv by key tile."""

import triton
import triton.language as tl

from .parts import (
    FENCES_LACK,
    add_atomically,
    add_outer,
    inner,
    load_keys,
    load_numbers,
    load_rows,
    load_some,
    row_of,
    scaled,
    scores_of,
    store_rows,
    unit_of,
    zeros,
)
from .seen import keys_of_tile, rows_of_tile, seen_by


@triton.jit
def _strides(own, shared):
    """`own`, or `shared` if that is None: one set of addresses takes fewer registers than two."""
    strides = shared if own is None else own
    return strides


@triton.jit
def _grad_of_queries(
    dq, q, dout, lse2, delta, k, v, at_k, at_v, start, hi, first, end, seen_keys, scale,
    MASKED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one key tile to dq / scale of a tile of query rows."""
    local = tl.arange(0, KEYS)
    cols = start + local
    if MASKED:
        local = tl.minimum(local, hi - 1 - start)
        keys = load_keys(k, start, local, at_k[0], seen_keys, D, E)
    else:
        keys = load_rows(k + start.to(tl.int64) * at_k[0], local, at_k[0], D, E)
    scores, slope = scores_of(q, keys, scale, E, SOFTCAP, PRECISION)
    p = tl.math.exp2(scores * unit_of(scale, SOFTCAP) - lse2[:, None])
    if MASKED:
        p = tl.where((cols[None, :] >= first[:, None]) & (cols[None, :] < end[:, None]), p, 0.0)
    values = load_rows(v + start.to(tl.int64) * at_v[0], local, at_v[0], DV, EV)
    if not FENCES_LACK:
        delta = tl.load(delta)
    ds = p * (inner(dout, values, EV, PRECISION) - delta[:, None])
    if SOFTCAP > 0:
        ds *= slope
    if MASKED:
        ds = tl.where(p != 0, ds, 0.0)  # not NaN, nor infinity times 0
    return add_outer(dq, ds.to(keys[0].dtype), keys, E, PRECISION)


@triton.jit(do_not_specialize=["s", "t", "group", "heads_a_sample"])
def query_grad_kernel(
    dout, q, k, v, lse2, delta, dq, first, end, seen_keys, s, t, group, heads_a_sample, scale,
    at_q, at_k, at_v, at_dout, at_dq,
    MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr,
    EV: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of query rows of one head; tiles in the order of `forward_kernel`."""
    at_dout = _strides(at_dout, at_q)
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
    queries = load_rows(row_of(q, at_q, row, head, g), local, at_q[0], D, E)
    grads = load_rows(row_of(dout, at_dout, row, head, g), local, at_dout[0], DV, EV)
    stats = tl.program_id(1).to(tl.int64) * s + row
    lse2 = tl.load(lse2 + stats + local)
    delta += stats + local
    if FENCES_LACK:  # with fences, Triton leaves a load in the loop
        delta = tl.load(delta)
    k += head.to(tl.int64) * at_k[1]
    v += head.to(tl.int64) * at_v[1]
    f, e = seen_by(row + local, inside, first, end, t, MASK)
    acc = zeros(ROWS, D, E)
    for i in range(tiles - full):
        start = lo + (i + tl.where(i < before, 0, full)) * KEYS
        acc = _grad_of_queries(
            acc, queries, grads, lse2, delta, k, v, at_k, at_v, start, hi, f, e, seen_keys, scale,
            True, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
        )  # fmt: skip
    for i in range(before, before + full):
        start = lo + i * KEYS
        acc = _grad_of_queries(
            acc, queries, grads, lse2, delta, k, v, at_k, at_v, start, hi, f, e, seen_keys, scale,
            False, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
        )  # fmt: skip
    store_rows(row_of(dq, at_dq, row, head, g), local, at_dq[0], scaled(acc, scale, E), inside, D, E)


@triton.jit
def _grad_of_keys(
    state, k, v, dout, q, lse2, delta, dq, at_q, at_dout, at_dq, start, hi, key, head, g,
    group, first, end, s, t, scale,
    MASKED: tl.constexpr, MASK: tl.constexpr, WITH_DQ: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of a tile of query rows to dk / scale and dv of a key tile, and to dq if `WITH_DQ`."""
    dk, dv = state
    local = tl.arange(0, ROWS)
    rows = start + local
    stats = (head * group + g).to(tl.int64) * s
    lse2 += stats
    delta += stats
    if MASKED:
        inside = rows < hi
        local = tl.minimum(local, hi - 1 - start)
        lse2 = load_numbers(lse2 + (start + local), COPIES)
        queries = load_some(row_of(q, at_q, start, head, g), local, at_q[0], lse2 > float("-inf"), D, E)
    else:
        lse2 = load_numbers(lse2 + rows, COPIES)
        queries = load_rows(row_of(q, at_q, start, head, g), local, at_q[0], D, E)
    scores, slope = scores_of(k, queries, scale, E, SOFTCAP, PRECISION)
    p = tl.math.exp2(scores * unit_of(scale, SOFTCAP) - lse2[None, :])
    if MASKED:
        cols = key + tl.arange(0, KEYS)[:, None]
        f, e = seen_by(rows, inside, first, end, t, MASK, COPIES)
        p = tl.where((cols >= f[None, :]) & (cols < e[None, :]), p, 0.0)
    grads = load_rows(row_of(dout, at_dout, start, head, g), local, at_dout[0], DV, EV)
    delta = load_numbers(delta + (start + local), COPIES)
    dv = add_outer(dv, p.to(grads[0].dtype), grads, EV, PRECISION)
    ds = p * (inner(v, grads, EV, PRECISION) - delta[None, :])
    if SOFTCAP > 0:
        ds *= slope
    if MASKED:
        ds = tl.where(p != 0, ds, 0.0)  # not NaN, nor infinity times 0
    ds = ds.to(queries[0].dtype)
    dk = add_outer(dk, ds, queries, E, PRECISION)
    if WITH_DQ:
        part = scaled(add_outer(zeros(ROWS, D, E), tl.trans(ds), k, E, PRECISION), scale, E)
        add_atomically(row_of(dq, at_dq, start, head, g), local, at_dq[0], part, D, E)  # 0 for rows not inside
    return dk, dv


@triton.jit(do_not_specialize=["s", "t", "group", "heads_a_sample", "parts"])
def key_grad_kernel(
    dout, q, k, v, lse2, delta, dq, dk, dv, first, end, seen_keys, rows_seeing, s, t, group, heads_a_sample, parts,
    scale, at_q, at_k, at_v, at_dout, at_dq, at_dk, at_dv,
    MASK: tl.constexpr, WITH_DQ: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile, summed over the query heads that read it; with `WITH_DQ` adds to dq atomically.

    Each key/value head is split into `parts` heads, each with a part of its query heads and with its own dk and dv.
    `rows_seeing`: for each sample and tile, which rows see some of its keys and which see all, as kernel.py finds.
    """
    at_dout, at_dv = _strides(at_dout, at_q), _strides(at_dv, at_dk)
    tile, head = tl.program_id(0), tl.program_id(1)
    tiles = tl.num_programs(0)
    if MASK == "key_ranges":
        first += (head // heads_a_sample).to(tl.int64) * s
        end += (head // heads_a_sample).to(tl.int64) * s
        seen_keys += (head // heads_a_sample).to(tl.int64) * t
        rows_seeing += (head // heads_a_sample) * 4 * tiles
    key = tile * KEYS
    lo, hi, before, full, count = rows_of_tile(key, rows_seeing, tile, tiles, s, t, MASK, ROWS, KEYS)

    local = tl.arange(0, KEYS)
    inside = key + local < t
    local = tl.minimum(local, t - 1 - key)
    k += (head // parts).to(tl.int64) * at_k[1]
    v += (head // parts).to(tl.int64) * at_v[1]
    keys = load_keys(k, key, local, at_k[0], seen_keys if WITH_DQ else None, D, E)
    values = load_rows(v + key.to(tl.int64) * at_v[0], local, at_v[0], DV, EV)
    state = (zeros(KEYS, D, E), zeros(KEYS, DV, EV))
    masked = count - full
    i, g = 0, 0
    for _ in range(group * masked):
        start = lo + (i + tl.where(i < before, 0, full)) * ROWS
        state = _grad_of_keys(
            state, keys, values, dout, q, lse2, delta, dq, at_q, at_dout, at_dq, start, hi, key, head, g,
            group, first, end, s, t, scale, True, MASK, WITH_DQ, ROWS, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
            COPIES,
        )  # fmt: skip
        i += 1
        if i == masked:  # on to the next head; cheaper in registers than a division
            i = 0
            g += 1
    i, g = 0, 0
    for _ in range(group * full):
        start = lo + (before + i) * ROWS
        state = _grad_of_keys(
            state, keys, values, dout, q, lse2, delta, dq, at_q, at_dout, at_dq, start, hi, key, head, g,
            group, first, end, s, t, scale, False, MASK, WITH_DQ, ROWS, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
            COPIES,
        )  # fmt: skip
        i += 1
        if i == full:  # on to the next head; cheaper in registers than a division
            i = 0
            g += 1
    dk += key.to(tl.int64) * at_dk[0] + head.to(tl.int64) * at_dk[1]
    dv += key.to(tl.int64) * at_dv[0] + head.to(tl.int64) * at_dv[1]
    store_rows(dk, local, at_dk[0], scaled(state[0], scale, E), inside, D, E)
    store_rows(dv, local, at_dv[0], state[1], inside, DV, EV)
