"""The attention of decode rows over cached pages on a GPU: one launch for all rows, with the page tables as tensors."""

import numpy
import torch
from torch import Tensor

from megatron.context_parallel.integration.spec import ContextParallelAttention
from megatron.context_parallel.kernels.paged import PagedKernel, Seen, merge_rows, refusal
from megatron.context_parallel.kernels.to_device import to_device

from .cache import KVCache
from .decode_rows import DecodeRows
from .heads import Heads


def can_attend_to_pages(
    cache: KVCache, heads: Heads, cores: list[ContextParallelAttention], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether `DecodePages` can compute all layers, and no other kernel was asked for."""
    if not {core.backend for core in cores} <= {"auto", "triton"}:
        return False
    return refusal(device, dtype, heads.key_dim, heads.value_dim, cache.form) is None


class DecodePages:
    """As `DecodeRanges`, with fixed tensors: the pages of each row, and which of their rows it sees.

    The host writes them once for each step. Each layer is one launch, and one that merges.

    Args:
        cores: the attention of each layer.
        sent: [n, size, heads, dv + 1] in float32, where the outputs of all rows go.
    """

    def __init__(
        self,
        cache: KVCache,
        heads: Heads,
        cores: list[ContextParallelAttention],
        gathered: Tensor,
        sent: Tensor,
        parts: Tensor,
    ) -> None:
        self.cache = cache
        device = gathered.device
        n, size = gathered.shape[:2]
        self.queries, flat = gathered.flatten(0, 1), sent.flatten(0, 1)
        self.outs, self.lses = flat[..., :-1], flat[..., -1]
        self.part_outs, self.part_lses = parts[..., :-1], parts[..., -1]
        self.out, self.lse = torch.zeros_like(self.part_outs[0]), torch.zeros_like(self.part_lses[0])
        self.kernel = PagedKernel(n * size, heads.queries, heads.keys, heads.value_dim, likely=size, device=device)
        self.windows = sorted({core.window[0] for core in cores})
        self.table = torch.zeros(n * size, cache.pages, dtype=torch.int32, device=device)
        self.bounds = torch.zeros(1 + len(self.windows), n * size, dtype=torch.int32, device=device)
        self.seen = {
            window: Seen(self.table, first, self.bounds[0], cache.page)
            for window, first in zip(self.windows, self.bounds[1:], strict=True)
        }

    def begin(self, rows: DecodeRows) -> None:
        """Takes the rows of a step."""
        pages = rows.pages()
        bounds = numpy.zeros(self.bounds.shape, numpy.int32)  # padding sees nothing
        table = numpy.zeros((len(self.table), max(map(len, pages.values()), default=0)), numpy.int32)
        for row, of_row in pages.items():
            table[row, : len(of_row)] = of_row
        for line, window in enumerate(self.windows, 1):
            for row, (first, end) in rows.bounds(window).items():
                bounds[0, row], bounds[line, row] = end, first
        self.table[:, : table.shape[1]].copy_(to_device(torch.from_numpy(table), self.table.device))
        self.bounds.copy_(to_device(torch.from_numpy(bounds), self.table.device))

    def attend(self, core: ContextParallelAttention) -> None:
        """Computes the partial outputs of a layer."""
        keys, values = self.cache.stored(core.layer_number - 1)
        seen = self.seen[core.window[0]]
        given = self.queries, keys, values, seen, core.scale, self.outs, self.lses
        self.kernel.forward(*given, self.cache.form)

    def merged(self) -> Tensor:
        """The outputs [size, heads, dv] of this rank's rows; 0 for padding."""
        merge_rows(self.out, self.lse, self.part_outs, self.part_lses)
        return self.out

    def merged_lse(self) -> Tensor:
        """Their log-sum-exp [size, heads], after `merged`."""
        return self.lse
