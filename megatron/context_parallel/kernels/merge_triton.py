"""Merging partial outputs in one pass over memory (Triton)."""

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # per program


def merge_fused(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """`merge.merge` on a GPU: out, other_out [s, B, G, d], lse, other_lse [s, B, G], with any strides."""
    s, batch, group, d = out.shape
    width = triton.next_power_of_2(d)
    rows = ELEMENTS // width
    merge_kernel[triton.cdiv(s * batch * group, rows),](
        out, lse, other_out, other_lse, s * batch * group, batch, group,
        out.stride(), lse.stride(), other_out.stride(), other_lse.stride(), D=d, WIDTH=width, ROWS=rows,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def offsets(strides, i, batch, group):
    """Offsets of rows i of s × B × G."""
    i = i.to(tl.int64)
    return i // (batch * group) * strides[0] + i // group % batch * strides[1] + i % group * strides[2]


@triton.jit(do_not_specialize=["count", "batch", "group"])
def merge_kernel(
    out, lse, other_out, other_lse, count, batch, group, at_out, at_lse, at_other_out, at_other_lse,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program merges ROWS rows in place."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < count
    lse += offsets(at_lse, i, batch, group)
    a = tl.load(lse, inside, 0.0)
    b = tl.load(other_lse + offsets(at_other_lse, i, batch, group), inside, 0.0).to(a.dtype)
    unseen = (a == float("-inf")) & (b == float("-inf"))
    top = tl.where(unseen, 0.0, tl.maximum(a, b))
    weight_a, weight_b = tl.where(unseen, 1.0, tl.exp(a - top)), tl.exp(b - top)
    total = weight_a + weight_b
    tl.debug_barrier()  # several warps read the number of a row, and one writes it: all must have read it before
    tl.store(lse, tl.where(unseen, a, top + tl.log(total)), inside)

    cols = tl.arange(0, WIDTH)
    mask = inside[:, None] & (cols < D)[None, :]
    out += offsets(at_out, i, batch, group)[:, None] + cols[None, :] * at_out[3]
    x = tl.load(out, mask, 0.0)
    y = tl.load(
        other_out + offsets(at_other_out, i, batch, group)[:, None] + cols[None, :] * at_other_out[3], mask, 0.0
    )
    share_a, share_b = (weight_a / total).to(tl.float32), (weight_b / total).to(tl.float32)
    # Both weights, because x + (y - x) * weight would lose all digits of a small y next to a large x.
    tl.store(out, x * share_a[:, None] + y.to(tl.float32) * share_b[:, None], mask)
