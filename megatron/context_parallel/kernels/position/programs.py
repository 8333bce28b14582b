"""The position kernel's device code (Triton): block attention where each query row sees one run of key rows.

A matrix of head_dim columns is held as a tuple of one or two parts, D and E columns wide, both powers of two (80 is
64 + 16; E is 0 for powers of two), so that no head_dim is padded; of the values' own size DV and EV. `MASK` is "full",
"causal" or "runs"; only for "runs" are `first` and `end` read. Exponentials are taken to base 2, with log2(e) folded
into the scale. With `SOFTCAP` 0 nothing is capped, and no code for it is made.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # a running maximum before the first score: finite, so that no difference is NaN


@triton.jit
def _head_of(base, at, head, g):
    """Where a head of a [s, B, G, ...] tensor with strides `at` begins."""
    return base + head.to(tl.int64) * at[1] + tl.cast(g, tl.int64) * at[2]


@triton.jit
def _row_of(base, at, row, head, g):
    return _head_of(base, at, head, g) + row.to(tl.int64) * at[0]


@triton.jit
def _strides(own, shared):
    """`own`, or `shared` where that is None: one set of addresses takes fewer registers than two."""
    strides = shared if own is None else own
    return strides


@triton.jit
def _load(base, rows, stride, D: tl.constexpr, E: tl.constexpr):
    at = rows[:, None] * stride
    x = tl.load(base + (at + tl.arange(0, D)[None, :]))
    parts = (x, tl.load(base + (at + D + tl.arange(0, E)[None, :]))) if E > 0 else (x,)
    return parts


@triton.jit
def _load_some(base, rows, stride, some, D: tl.constexpr, E: tl.constexpr):
    """`_load` with zeros for all but some rows: a weight of 0 does not stop NaN or infinity."""
    at = rows[:, None] * stride
    x = tl.load(base + (at + tl.arange(0, D)[None, :]), some[:, None], 0.0)
    parts = (x, tl.load(base + (at + D + tl.arange(0, E)[None, :]), some[:, None], 0.0)) if E > 0 else (x,)
    return parts


@triton.jit
def _store(base, rows, stride, parts, mask, D: tl.constexpr, E: tl.constexpr):
    at = base + rows[:, None] * stride
    tl.store(at + tl.arange(0, D)[None, :], parts[0].to(base.dtype.element_ty), mask[:, None])
    if E > 0:
        tl.store(at + D + tl.arange(0, E)[None, :], parts[1].to(base.dtype.element_ty), mask[:, None])


@triton.jit
def _add_atomically(base, rows, stride, parts, D: tl.constexpr, E: tl.constexpr):
    at = base + rows[:, None] * stride
    tl.atomic_add(at + tl.arange(0, D)[None, :], parts[0], sem="relaxed")
    if E > 0:
        tl.atomic_add(at + D + tl.arange(0, E)[None, :], parts[1], sem="relaxed")


@triton.jit
def _zeros(ROWS: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    x = tl.zeros([ROWS, D], tl.float32)
    parts = (x, tl.zeros([ROWS, E], tl.float32)) if E > 0 else (x,)
    return parts


@triton.jit
def _scaled(parts, factor, E: tl.constexpr):
    scaled = (parts[0] * factor, parts[1] * factor) if E > 0 else (parts[0] * factor,)
    return scaled


@triton.jit
def _inner(a, b, E: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ, of matrices of head_dim columns."""
    x = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if E > 0:
        x = tl.dot(a[1], tl.trans(b[1]), x, input_precision=PRECISION)
    return x


@triton.jit
def _tanh(x, FLOAT32: tl.constexpr):
    """tanh to 1e-7, and its derivative; with `FLOAT32` to a few units in the last place, also where it is small."""
    fade = tl.math.exp2(tl.abs(x) * (-2 * LOG2_E))
    share = 1 / (1 + fade)
    tanh = tl.where(x < 0, fade - 1, 1 - fade) * share
    if FLOAT32:
        y = x * x
        series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
        tanh = tl.where(y < 0.0625, series, tanh)
    return tanh, 4 * fade * share * share


@triton.jit
def _scores(a, b, scale, E: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a and b over `_unit(scale)`, and their derivative by scale * a bᵀ if they are capped."""
    x = _inner(a, b, E, PRECISION)
    both = _tanh(x * (scale / SOFTCAP), a[0].dtype == tl.float32) if SOFTCAP > 0 else (x, 1.0)
    return both


@triton.jit
def _unit(scale, SOFTCAP: tl.constexpr):
    """What `_scores` are multiplied by to be powers of 2."""
    unit = SOFTCAP * LOG2_E if SOFTCAP > 0 else scale * LOG2_E
    return unit


@triton.jit
def _add_outer(into, weights, x, E: tl.constexpr, PRECISION: tl.constexpr):
    """into + weights x, where x has head_dim columns."""
    if E > 0:
        parts = (
            tl.dot(weights, x[0], into[0], input_precision=PRECISION),
            tl.dot(weights, x[1], into[1], input_precision=PRECISION),
        )
    else:
        parts = (tl.dot(weights, x[0], into[0], input_precision=PRECISION),)  # type: ignore[assignment]  # of E
    return parts


@triton.jit
def _seen_by(rows, inside, first, end, t, MASK: tl.constexpr):
    """The run of key rows that each of these query rows sees; none where not `inside`."""
    if MASK == "runs":
        bounds = (tl.load(first + rows, inside, 0), tl.load(end + rows, inside, 0))
    elif MASK == "causal":
        bounds = (rows * 0, tl.where(inside, rows + 1, 0))
    else:
        bounds = (rows * 0, tl.where(inside, t, 0))
    return bounds


@triton.jit
def _tiles(lo, full_lo, full_hi, hi, TILE: tl.constexpr):
    """Cuts lo..hi into tiles from `lo` on: how many there are before the full ones, how many full ones, and in all."""
    hi = tl.maximum(hi, lo)
    before = tl.cdiv(tl.minimum(full_lo, hi) - lo, TILE)
    full = tl.maximum((full_hi - lo) // TILE - before, 0)
    return before, full, tl.cdiv(hi - lo, TILE)


@triton.jit
def _keys_of_tile(row, last, first, end, t, MASK: tl.constexpr, KEYS: tl.constexpr):
    """The first key that rows `row` .. `last` see, the end of the last, and the tiles between."""
    lo, full_hi = _seen_by(row, True, first, end, t, MASK)
    full_lo, hi = _seen_by(last, True, first, end, t, MASK)
    before, full, tiles = _tiles(lo, full_lo, full_hi, hi, KEYS)
    return lo, hi, before, full, tiles


@triton.jit
def _rows_of_tile(key, ranges, tile, tiles, s, t, MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The first query row that sees any key of a tile from `key` on, the end of the last, and the tiles between."""
    if MASK == "runs":
        lo, full_lo = tl.load(ranges + tile), tl.load(ranges + tiles + tile)
        full_hi, hi = tl.load(ranges + 2 * tiles + tile), tl.load(ranges + 3 * tiles + tile)
    elif MASK == "causal":
        lo, full_lo, full_hi, hi = key, key + KEYS - 1, s, s
    else:
        lo, full_lo, full_hi, hi = 0, tl.where(key + KEYS <= t, 0, s), s, s
    before, full, count = _tiles(lo, full_lo, full_hi, hi, ROWS)
    return lo, hi, before, full, count


@triton.jit
def _load_keys(base, start, rows, stride, seen, D: tl.constexpr, E: tl.constexpr):
    """Key rows start + `rows`, with zeros for those that nobody sees."""
    base += start.to(tl.int64) * stride
    if seen is None:
        parts = _load(base, rows, stride, D, E)
    else:
        parts = _load_some(base, rows, stride, tl.load(seen + start + rows) > 0, D, E)
    return parts


@triton.jit
def _attend(
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
    keys = _load(k + start.to(tl.int64) * at_k[0], local, at_k[0], D, E)
    scores, _ = _scores(q, keys, scale, E, SOFTCAP, PRECISION)
    scale2 = _unit(scale, SOFTCAP)
    if MASKED:
        seen = (cols[None, :] >= first[:, None]) & (cols[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale2)
    p = tl.math.exp2(scores * scale2 - new_top[:, None])
    fade = tl.math.exp2(top - new_top)
    total = total * fade + tl.sum(p, 1)
    if MASKED:
        values = _load_keys(v, start, local, at_v[0], seen_keys, DV, EV)
    else:
        values = _load(v + start.to(tl.int64) * at_v[0], local, at_v[0], DV, EV)
    out = _add_outer(_scaled(out, fade[:, None], EV), p.to(values[0].dtype), values, EV, PRECISION)
    return out, total, new_top


@triton.jit(do_not_specialize=["s", "t", "group", "heads_a_sample"])
def forward_kernel(
    q, k, v, out, lse, first, end, seen_keys, s, t, group, heads_a_sample, scale, at_q, at_k, at_v, at_out, at_lse,
    MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr,
    EV: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of query rows of one head. Tiles of late rows, which see most, are started first."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head, g = tl.program_id(1) // group, tl.program_id(1) % group
    if MASK == "runs":
        first += (head // heads_a_sample).to(tl.int64) * s
        end += (head // heads_a_sample).to(tl.int64) * s
        seen_keys += (head // heads_a_sample).to(tl.int64) * t
    lo, hi, before, full, tiles = _keys_of_tile(row, tl.minimum(row + ROWS, s) - 1, first, end, t, MASK, KEYS)

    local = tl.arange(0, ROWS)
    inside = row + local < s
    local = tl.minimum(local, s - 1 - row)
    k += head.to(tl.int64) * at_k[1]
    v += head.to(tl.int64) * at_v[1]
    queries = _load(_row_of(q, at_q, row, head, g), local, at_q[0], D, E)
    first_seen, end_seen = _seen_by(row + local, inside, first, end, t, MASK)
    state = (_zeros(ROWS, DV, EV), tl.zeros([ROWS], tl.float32), tl.full([ROWS], LOWEST, tl.float32))
    for i in range(tiles - full):
        start = lo + (i + tl.where(i < before, 0, full)) * KEYS
        state = _attend(
            state, queries, k, v, at_k, at_v, start, hi, first_seen, end_seen, seen_keys, scale,
            True, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
        )  # fmt: skip
    for i in range(before, before + full):
        start = lo + i * KEYS
        state = _attend(
            state, queries, k, v, at_k, at_v, start, hi, first_seen, end_seen, seen_keys, scale,
            False, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, total, top = state
    unseen = total == 0
    acc = _scaled(acc, (1 / tl.where(unseen, 1, total))[:, None], EV)
    _store(_row_of(out, at_out, row, head, g), local, at_out[0], acc, inside, DV, EV)
    log = tl.where(unseen, float("-inf"), (top + tl.math.log2(total)) / LOG2_E)
    tl.store(_row_of(lse, at_lse, row, head, g) + local * at_lse[0], log, inside)


@triton.jit
def _grad_of_queries(
    dq, q, dout, lse2, delta, k, v, at_k, at_v, start, hi, first, end, seen_keys, scale,
    MASKED: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what one key tile gives to dq / scale of a tile of query rows."""
    local = tl.arange(0, KEYS)
    cols = start + local
    if MASKED:
        local = tl.minimum(local, hi - 1 - start)
        keys = _load_keys(k, start, local, at_k[0], seen_keys, D, E)
    else:
        keys = _load(k + start.to(tl.int64) * at_k[0], local, at_k[0], D, E)
    scores, slope = _scores(q, keys, scale, E, SOFTCAP, PRECISION)
    p = tl.math.exp2(scores * _unit(scale, SOFTCAP) - lse2[:, None])
    if MASKED:
        p = tl.where((cols[None, :] >= first[:, None]) & (cols[None, :] < end[:, None]), p, 0.0)
    values = _load(v + start.to(tl.int64) * at_v[0], local, at_v[0], DV, EV)
    ds = p * (_inner(dout, values, EV, PRECISION) - tl.load(delta)[:, None])
    if SOFTCAP > 0:
        ds *= slope
    if MASKED:
        ds = tl.where(p != 0, ds, 0.0)  # not NaN, nor infinity times 0
    return _add_outer(dq, ds.to(keys[0].dtype), keys, E, PRECISION)


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
    if MASK == "runs":
        first += (head // heads_a_sample).to(tl.int64) * s
        end += (head // heads_a_sample).to(tl.int64) * s
        seen_keys += (head // heads_a_sample).to(tl.int64) * t
    lo, hi, before, full, tiles = _keys_of_tile(row, tl.minimum(row + ROWS, s) - 1, first, end, t, MASK, KEYS)

    local = tl.arange(0, ROWS)
    inside = row + local < s
    local = tl.minimum(local, s - 1 - row)
    queries = _load(_row_of(q, at_q, row, head, g), local, at_q[0], D, E)
    grads = _load(_row_of(dout, at_dout, row, head, g), local, at_dout[0], DV, EV)
    stats = tl.program_id(1).to(tl.int64) * s + row
    lse2 = tl.load(lse2 + stats + local)
    delta += stats + local
    k += head.to(tl.int64) * at_k[1]
    v += head.to(tl.int64) * at_v[1]
    f, e = _seen_by(row + local, inside, first, end, t, MASK)
    acc = _zeros(ROWS, D, E)
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
    _store(_row_of(dq, at_dq, row, head, g), local, at_dq[0], _scaled(acc, scale, E), inside, D, E)


@triton.jit
def _grad_of_keys(
    state, k, v, dout, q, lse2, delta, dq, at_q, at_dout, at_dq, start, hi, key, head, g,
    group, first, end, s, t, scale,
    MASKED: tl.constexpr, MASK: tl.constexpr, WITH_DQ: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what one tile of query rows gives to dk / scale and dv of a key tile, and to dq in memory if `WITH_DQ`."""
    dk, dv = state
    local = tl.arange(0, ROWS)
    rows = start + local
    stats = (head * group + g).to(tl.int64) * s
    lse2 += stats
    delta += stats
    if MASKED:
        inside = rows < hi
        local = tl.minimum(local, hi - 1 - start)
        lse2 = tl.load(lse2 + (start + local))
        queries = _load_some(_row_of(q, at_q, start, head, g), local, at_q[0], lse2 > float("-inf"), D, E)
    else:
        lse2 = tl.load(lse2 + rows)
        queries = _load(_row_of(q, at_q, start, head, g), local, at_q[0], D, E)
    scores, slope = _scores(k, queries, scale, E, SOFTCAP, PRECISION)
    p = tl.math.exp2(scores * _unit(scale, SOFTCAP) - lse2[None, :])
    if MASKED:
        cols = key + tl.arange(0, KEYS)[:, None]
        f, e = _seen_by(rows, inside, first, end, t, MASK)
        p = tl.where((cols >= f[None, :]) & (cols < e[None, :]), p, 0.0)
    grads = _load(_row_of(dout, at_dout, start, head, g), local, at_dout[0], DV, EV)
    delta = tl.load(delta + (start + local))
    dv = _add_outer(dv, p.to(grads[0].dtype), grads, EV, PRECISION)
    ds = p * (_inner(v, grads, EV, PRECISION) - delta[None, :])
    if SOFTCAP > 0:
        ds *= slope
    if MASKED:
        ds = tl.where(p != 0, ds, 0.0)  # not NaN, nor infinity times 0
    ds = ds.to(queries[0].dtype)
    dk = _add_outer(dk, ds, queries, E, PRECISION)
    if WITH_DQ:
        part = _scaled(_add_outer(_zeros(ROWS, D, E), tl.trans(ds), k, E, PRECISION), scale, E)
        _add_atomically(_row_of(dq, at_dq, start, head, g), local, at_dq[0], part, D, E)  # 0 for rows not inside
    return dk, dv


@triton.jit(do_not_specialize=["s", "t", "group", "heads_a_sample", "parts"])
def key_grad_kernel(
    dout, q, k, v, lse2, delta, dq, dk, dv, first, end, seen_keys, ranges, s, t, group, heads_a_sample, parts, scale,
    at_q, at_k, at_v, at_dout, at_dq, at_dk, at_dv,
    MASK: tl.constexpr, WITH_DQ: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, DV: tl.constexpr, EV: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile, summed over the query heads that read it; with `WITH_DQ` adds to dq atomically.

    Each key/value head counts as `parts` heads, each with a part of its query heads and with its own dk and dv.
    `ranges` holds for each sample and tile which rows see some of its keys, and which all (`position._rows_seeing`).
    """
    at_dout, at_dv = _strides(at_dout, at_q), _strides(at_dv, at_dk)
    tile, head = tl.program_id(0), tl.program_id(1)
    tiles = tl.num_programs(0)
    if MASK == "runs":
        first += (head // heads_a_sample).to(tl.int64) * s
        end += (head // heads_a_sample).to(tl.int64) * s
        seen_keys += (head // heads_a_sample).to(tl.int64) * t
        ranges += (head // heads_a_sample) * 4 * tiles
    key = tile * KEYS
    lo, hi, before, full, count = _rows_of_tile(key, ranges, tile, tiles, s, t, MASK, ROWS, KEYS)

    local = tl.arange(0, KEYS)
    inside = key + local < t
    local = tl.minimum(local, t - 1 - key)
    k += (head // parts).to(tl.int64) * at_k[1]
    v += (head // parts).to(tl.int64) * at_v[1]
    keys = _load_keys(k, key, local, at_k[0], seen_keys if WITH_DQ else None, D, E)
    values = _load(v + key.to(tl.int64) * at_v[0], local, at_v[0], DV, EV)
    state = (_zeros(KEYS, D, E), _zeros(KEYS, DV, EV))
    masked = count - full
    i, g = 0, 0
    for _ in range(group * masked):
        start = lo + (i + tl.where(i < before, 0, full)) * ROWS
        state = _grad_of_keys(
            state, keys, values, dout, q, lse2, delta, dq, at_q, at_dout, at_dq, start, hi, key, head, g,
            group, first, end, s, t, scale, True, MASK, WITH_DQ, ROWS, KEYS, D, E, DV, EV, SOFTCAP, PRECISION,
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
        )  # fmt: skip
        i += 1
        if i == full:  # on to the next head; cheaper in registers than a division
            i = 0
            g += 1
    dk += key.to(tl.int64) * at_dk[0] + head.to(tl.int64) * at_dk[1]
    dv += key.to(tl.int64) * at_dv[0] + head.to(tl.int64) * at_dv[1]
    _store(dk, local, at_dk[0], _scaled(state[0], scale, E), inside, D, E)
    _store(dv, local, at_dv[0], state[1], inside, DV, EV)
