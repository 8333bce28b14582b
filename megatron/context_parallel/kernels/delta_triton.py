"""Prepares the log-sum-exp and delta for backward passes, in one launch each (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .merge_triton import ELEMENTS, offsets

LOG2_E = tl.constexpr(1.4426950408889634)


def by_head(lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """log2(e) * lse and delta, from [s, B, G] with any strides to [B * G, s] in float32."""
    s, batch, group = lse.shape
    lse2, delta_out = torch.empty(2, batch * group, s, dtype=torch.float32, device=lse.device)
    by_head_kernel[triton.cdiv(s, 256), batch * group](
        lse, delta, lse2, delta_out, s, group, lse.stride(), delta.stride(), ROWS=256, enable_fp_fusion=True
    )
    return lse2, delta_out


def output_with_fused(delta: Tensor, dout: Tensor) -> Tensor:
    """`delta.output_with` on a GPU: delta [s, B, G], dout [s, B, G, d], with any strides."""
    s, batch, group, d = dout.shape
    out = torch.empty_like(dout)
    width = triton.next_power_of_2(d)
    rows = ELEMENTS // width
    output_kernel[triton.cdiv(s * batch * group, rows),](
        out, delta, dout, s * batch * group, batch, group, out.stride(), delta.stride(), dout.stride(),
        D=d, WIDTH=width, ROWS=rows, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["s", "group"])
def by_head_kernel(lse, delta, lse2, delta_out, s, group, at_lse, at_delta, ROWS: tl.constexpr):
    """Each program computes ROWS rows of one head."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < s
    i = i.to(tl.int64)
    head, g = tl.program_id(1).to(tl.int64) // group, tl.program_id(1) % group
    x = tl.load(lse + i * at_lse[0] + head * at_lse[1] + g * at_lse[2], inside, 0.0)
    y = tl.load(delta + i * at_delta[0] + head * at_delta[1] + g * at_delta[2], inside, 0.0)
    i += tl.program_id(1).to(tl.int64) * s
    tl.store(lse2 + i, x.to(tl.float32) * LOG2_E, inside)
    tl.store(delta_out + i, y.to(tl.float32), inside)


@triton.jit(do_not_specialize=["count", "batch", "group"])
def output_kernel(
    out, delta, dout, count, batch, group, at_out, at_delta, at_dout,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program computes ROWS rows, scaled by their largest element, because squares may not fit float32."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < count
    cols = tl.arange(0, WIDTH)
    mask = inside[:, None] & (cols < D)[None, :]
    dout += offsets(at_dout, i, batch, group)[:, None] + cols[None, :] * at_dout[3]
    x = tl.load(dout, mask, 0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    top = tl.where(top == 0, 1.0, top)
    x = x / top[:, None]
    factor = tl.load(delta + offsets(at_delta, i, batch, group), inside, 0.0).to(tl.float32) / top
    factor = factor / tl.maximum(tl.sum(x * x, 1), 1.0)  # at least 1 unless the row is 0
    out += offsets(at_out, i, batch, group)[:, None] + cols[None, :] * at_out[3]
    tl.store(out, (x * factor[:, None]).to(out.dtype.element_ty), mask)
