"""Matrices in the position kernel's device code (Triton): loads and stores of rows, products, scores.

A matrix of head_dim columns is a tuple of one or two parts, D and E columns wide, both powers of two (80 is 64 + 16; E
is 0 for powers of two), so that no head_dim is padded. For values they are DV and EV. Exponentials use base 2, with
log2(e) folded into the scale. With `SOFTCAP` 0 nothing is capped, and no code for it is generated.
"""

import triton
import triton.language as tl

from . import fences

LOG2_E = tl.constexpr(1.4426950408889634)
FENCES_LACK = tl.constexpr(fences.lacking(triton.__version__))


@triton.jit
def _head_of(base, at, head, g):
    """The offset of a head of a [s, B, G, ...] tensor with strides `at`."""
    return base + head.to(tl.int64) * at[1] + tl.cast(g, tl.int64) * at[2]


@triton.jit
def row_of(base, at, row, head, g):
    return _head_of(base, at, head, g) + row.to(tl.int64) * at[0]


@triton.jit
def load_rows(base, rows, stride, D: tl.constexpr, E: tl.constexpr):
    at = rows[:, None] * stride
    x = tl.load(base + (at + tl.arange(0, D)[None, :]))
    parts = (x, tl.load(base + (at + D + tl.arange(0, E)[None, :]))) if E > 0 else (x,)
    return parts


@triton.jit
def load_some(base, rows, stride, some, D: tl.constexpr, E: tl.constexpr):
    """`load_rows` with zeros outside of some rows, because a weight of 0 does not remove NaN or infinity."""
    at = rows[:, None] * stride
    x = tl.load(base + (at + tl.arange(0, D)[None, :]), some[:, None], 0.0)
    parts = (x, tl.load(base + (at + D + tl.arange(0, E)[None, :]), some[:, None], 0.0)) if E > 0 else (x,)
    return parts


@triton.jit
def load_keys(base, start, rows, stride, seen, D: tl.constexpr, E: tl.constexpr):
    """Key rows start + `rows`, with zeros for keys that no query sees."""
    base += start.to(tl.int64) * stride
    if seen is None:
        parts = load_rows(base, rows, stride, D, E)
    else:
        parts = load_some(base, rows, stride, tl.load(seen + start + rows) > 0, D, E)
    return parts


@triton.jit
def load_numbers(places, COPIES: tl.constexpr):
    """A number for each row, at the pointers `places`. It is read `COPIES` times (see `_copies` in kernel.py)."""
    if COPIES == 1:
        x = tl.load(places)
    else:
        several = places[:, None] + tl.arange(0, COPIES)[None, :] * 0
        x = tl.max(tl.load(several), 1)
    return x


@triton.jit
def store_rows(base, rows, stride, parts, mask, D: tl.constexpr, E: tl.constexpr):
    at = base + rows[:, None] * stride
    tl.store(at + tl.arange(0, D)[None, :], parts[0].to(base.dtype.element_ty), mask[:, None])
    if E > 0:
        tl.store(at + D + tl.arange(0, E)[None, :], parts[1].to(base.dtype.element_ty), mask[:, None])


@triton.jit
def add_atomically(base, rows, stride, parts, D: tl.constexpr, E: tl.constexpr):
    at = base + rows[:, None] * stride
    tl.atomic_add(at + tl.arange(0, D)[None, :], parts[0], sem="relaxed")
    if E > 0:
        tl.atomic_add(at + D + tl.arange(0, E)[None, :], parts[1], sem="relaxed")


@triton.jit
def zeros(ROWS: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    x = tl.zeros([ROWS, D], tl.float32)
    parts = (x, tl.zeros([ROWS, E], tl.float32)) if E > 0 else (x,)
    return parts


@triton.jit
def scaled(parts, factor, E: tl.constexpr):
    product = (parts[0] * factor, parts[1] * factor) if E > 0 else (parts[0] * factor,)
    return product


@triton.jit
def _fence():
    """What threads copied to shared memory is there for the products that follow (see `fences.py`)."""
    if FENCES_LACK and tl.target_info.cuda_capability_geq(9):
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def inner(a, b, E: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ, of matrices of head_dim columns."""
    _fence()
    x = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if E > 0:
        x = tl.dot(a[1], tl.trans(b[1]), x, input_precision=PRECISION)
    return x


@triton.jit
def _tanh(x, FLOAT32: tl.constexpr):
    """tanh to 1e-7, and its derivative; with `FLOAT32` to a few units in the last place, also for small values."""
    fade = tl.math.exp2(tl.abs(x) * (-2 * LOG2_E))
    share = 1 / (1 + fade)
    tanh = tl.where(x < 0, fade - 1, 1 - fade) * share
    if FLOAT32:
        y = x * x
        series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
        tanh = tl.where(y < 0.0625, series, tanh)
    return tanh, 4 * fade * share * share


@triton.jit
def scores_of(a, b, scale, E: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a and b over `unit_of(scale)`, and their derivative by scale * a bᵀ if they are capped."""
    x = inner(a, b, E, PRECISION)
    both = _tanh(x * (scale / SOFTCAP), a[0].dtype == tl.float32) if SOFTCAP > 0 else (x, 1.0)
    return both


@triton.jit
def unit_of(scale, SOFTCAP: tl.constexpr):
    """The factor that turns the result of `scores_of` into exponents of 2."""
    unit = SOFTCAP * LOG2_E if SOFTCAP > 0 else scale * LOG2_E
    return unit


@triton.jit
def add_outer(into, weights, x, E: tl.constexpr, PRECISION: tl.constexpr):
    """into + weights x, where x has head_dim columns."""
    _fence()
    if E > 0:
        parts = (
            tl.dot(weights, x[0], into[0], input_precision=PRECISION),
            tl.dot(weights, x[1], into[1], input_precision=PRECISION),
        )
    else:
        parts = (tl.dot(weights, x[0], into[0], input_precision=PRECISION),)  # type: ignore[assignment]  # of E
    return parts
