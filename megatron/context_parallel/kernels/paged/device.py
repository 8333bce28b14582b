"""The paged kernel on the device (Triton): each program attends over a part of the keys of a query row.

A tile has the query heads of a row that share a key/value head, so keys are read once for them.
"""

import triton
import triton.language as tl

from megatron.context_parallel.kernels.position.forward import LOWEST, weigh
from megatron.context_parallel.kernels.position.parts import (
    LOG2_E,
    add_outer,
    inner,
    load_rows,
    scaled,
    store_rows,
    zeros,
)


@triton.jit
def _wide(numbers, scales, FORM: tl.constexpr):
    """Numbers of 8 bits, read as bytes, times the scale of their row."""
    x = numbers.to(tl.int8, bitcast=True) if FORM == "int8" else numbers.to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float32) * scales[:, None]


@triton.jit
def _load_cached(base, scales, slots, at, dtype: tl.constexpr, FORM: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """Rows of the cache. Those in 8 bits have their scale in the 4 bytes behind them."""
    parts = load_rows(base, slots, at, D, E)
    if FORM != "":
        factor = tl.load(scales + slots * (at // 4) + (D + E) // 4)
        one = _wide(parts[0], factor, FORM).to(dtype)
        parts = (one, _wide(parts[1], factor, FORM).to(dtype)) if E > 0 else (one,)
    return parts


@triton.jit(do_not_specialize=["group", "at_table"])
def paged_kernel(
    q, k, v, k_scales, v_scales, out, lse, table, first, end, group, at_table, scale, at_q, at_k, at_v,
    PAGE: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    DV: tl.constexpr, EV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [parts, rows, heads, dv] and lse [parts, rows, heads] in float32: a part of the keys of one row."""
    part, row = tl.program_id(0), tl.program_id(1)
    tiles_of_group = tl.cdiv(group, ROWS)
    head, tile = tl.program_id(2) // tiles_of_group, tl.program_id(2) % tiles_of_group
    heads = tl.num_programs(2) // tiles_of_group * group
    local = tile * ROWS + tl.arange(0, ROWS)
    inside = local < group
    of_group = head * group + tl.minimum(local, group - 1)

    begin, stop = tl.load(first + row), tl.load(end + row)
    tiles_a_part = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), KEYS), tl.num_programs(0))
    begin += part * tiles_a_part * KEYS
    stop = tl.minimum(begin + tiles_a_part * KEYS, stop)
    table += row.to(tl.int64) * at_table
    k += head.to(tl.int64) * at_k[1]
    v += head.to(tl.int64) * at_v[1]
    k_scales += head.to(tl.int64) * (at_k[1] // 4)
    v_scales += head.to(tl.int64) * (at_v[1] // 4)
    queries = load_rows(q + row.to(tl.int64) * at_q[0], of_group, at_q[1], D, E)
    acc = zeros(ROWS, DV, EV)
    total, top = tl.zeros([ROWS], tl.float32), tl.full([ROWS], LOWEST, tl.float32)
    for i in range(tl.cdiv(tl.maximum(stop - begin, 0), KEYS)):
        rows = begin + i * KEYS + tl.arange(0, KEYS)
        seen = rows < stop
        rows = tl.minimum(rows, stop - 1)
        slots = tl.load(table + rows // PAGE).to(tl.int64) * PAGE + rows % PAGE
        keys = _load_cached(k, k_scales, slots, at_k[0], q.dtype.element_ty, FORM, D, E)
        scores = tl.where(seen[None, :], inner(queries, keys, E, PRECISION), float("-inf"))
        p, fade, total, top = weigh(scores, scale * LOG2_E, total, top)
        values = _load_cached(v, v_scales, slots, at_v[0], q.dtype.element_ty, FORM, DV, EV)
        acc = add_outer(scaled(acc, fade[:, None], EV), p.to(values[0].dtype), values, EV, PRECISION)
    unseen = total == 0
    acc = scaled(acc, (1 / tl.where(unseen, 1, total))[:, None], EV)
    place = (part * tl.num_programs(1) + row).to(tl.int64) * heads + of_group
    store_rows(out, place, DV + EV, acc, inside, DV, EV)
    tl.store(lse + place, tl.where(unseen, float("-inf"), (top + tl.math.log2(total)) / LOG2_E), inside)
