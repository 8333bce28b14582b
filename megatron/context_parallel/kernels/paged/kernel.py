"""The paged kernel: attention of single query rows over cached keys where they lie, all rows in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.kernels import position
from megatron.context_parallel.kernels.position import PARTS
from megatron.context_parallel.kernels.position.kernel import PROGRAMS, precision
from megatron.context_parallel.kernels.position.tiles import FLOAT32, TILES_OF_FEW_ROWS, Tiles

MOST_PARTS = 64  # of the keys of a row: more would take longer to merge
ROWS_OF_MERGE = 16  # of a program
FP8 = 89  # the first architecture that converts fp8


class Seen(NamedTuple):
    """The cached rows that each query row sees: rows `first` to `end` - 1 of its pages, none if they are equal.

    Attributes:
        table: int32 [rows, width], the pages of each query row in order.
        first, end: int32 [rows].
        page: rows of a page.
    """

    table: Tensor
    first: Tensor
    end: Tensor
    page: int


def refusal(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, form: str | None) -> str | None:
    """Why the kernel cannot attend over a cache of these head_dims; None if it can.

    Args:
        dtype: of queries; form: of cached rows in 8 bits, one of `quantized.FORMATS`, or None.
    """
    if device.type != "cuda":
        return "the paged kernel runs on GPUs"
    capability = torch.cuda.get_device_capability(device)
    if form == "fp8" and position.architecture(capability) < FP8:
        return "sm_{}{} does not convert fp8".format(*capability)
    return position.triton_refusal(dtype, (key_dim, value_dim), capability)


class PagedKernel:
    """Attention of single query rows over cached keys where they lie. Its buffers and shapes are the same in each call.

    The keys of each row are split into the same number of parts, whatever their number. So a CUDA graph may capture a
    call. A second launch merges the parts.

    Args:
        rows: query rows of a call; heads: query heads; kv_heads, value_dim: of the cache.
        likely: the rows of a call that have keys, usually.
        processors: multiprocessors of the device.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        value_dim: int,
        *,
        likely: int,
        device: torch.device,
        processors: int | None = None,
    ) -> None:
        if processors is None:
            on_gpu = device.type == "cuda"
            processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self.device = device
        self.kv_heads, self.group = kv_heads, heads // kv_heads
        parts = min(MOST_PARTS, -(-PROGRAMS * processors // (likely * kv_heads)))
        self.outs = torch.zeros(parts, rows, heads, value_dim, dtype=torch.float32, device=device)
        self.lses = torch.zeros(parts, rows, heads, dtype=torch.float32, device=device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, out: Tensor, lse: Tensor, form: str | None
    ) -> None:
        """Writes the outputs [rows, heads, dv] and their log-sum-exp [rows, heads]: 0 and -inf for a row without keys.

        Args:
            q: [rows, heads, d]; k: [slots, kv_heads, d]; v: [slots, kv_heads, dv], with a contiguous last dimension.
                Rows in 8 bits are uint8 [..., d + 4], as `quantized.pack` made them.
            out, lse: float32, whose first two dimensions can be flattened.
        """
        from .device import paged_kernel

        parts, rows, _, value_dim = self.outs.shape
        tiles = self._tiles(q, value_dim, form)
        k_scales, v_scales = (x.flatten(1).view(torch.float32) if form else x for x in (k, v))
        tiles_of_group = -(-self.group // tiles.rows)
        d, e = PARTS[q.shape[-1]]
        dv, ev = PARTS[value_dim]
        paged_kernel[parts, rows, self.kv_heads * tiles_of_group](
            q, k, v, k_scales, v_scales, self.outs, self.lses, seen.table, seen.first, seen.end, self.group,
            seen.table.stride(0), scale, at_q=q.stride()[:2], at_k=k.stride()[:2], at_v=v.stride()[:2],
            PAGE=seen.page, FORM=form or "", ROWS=tiles.rows, KEYS=tiles.keys, D=d, E=e, DV=dv, EV=ev,
            PRECISION=precision(q), num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True,
        )  # fmt: skip
        merge_rows(out, lse, self.outs, self.lses)

    def _tiles(self, q: Tensor, value_dim: int, form: str | None) -> Tiles:
        small = q.dtype is torch.float32 or self.device.type == "cpu"  # the interpreter
        tiles = FLOAT32 if small else TILES_OF_FEW_ROWS[max(q.shape[-1], value_dim)]
        if form:  # rows of 8 bits and of 16 need registers at once
            tiles = tiles._replace(rows=16, keys=tiles.keys // 2, stages=min(tiles.stages, 2))
        return tiles._replace(rows=min(tiles.rows, max(16, 1 << (self.group - 1).bit_length())))


def merge_rows(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    """Merges partial outputs into `out` [rows, heads, dv] and `lse` [rows, heads]; 0 and -inf where there is none.

    Args:
        outs: float32 [parts, rows, heads, dv]; lses: [parts, rows, heads]. The dimensions before dv can be flattened.
    """
    from megatron.context_parallel.kernels.position.few_rows import merge_parts_kernel

    parts, rows, heads, value_dim = outs.shape
    count = rows * heads
    dv, ev = PARTS[value_dim]
    merge_parts_kernel[-(-count // ROWS_OF_MERGE),](
        out, lse, outs, lses, parts, 1, count, 1, out.stride(1), lse.stride(1), outs.stride(2), lses.stride(2),
        ROWS=ROWS_OF_MERGE, DV=dv, EV=ev, enable_fp_fusion=True,
    )  # fmt: skip
