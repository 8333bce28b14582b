"""The pages of one rank: keys and values of all layers."""

import torch
from torch import Tensor

from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.kernels.names import SCALE_BYTES
from megatron.context_parallel.kernels.quantized import QuantizedKernel, pack

from .cached_keys import LayerRows


class KVCache:
    """Keys (rotated) and values of one rank in pages, for each layer. All memory is allocated at once.

    Args:
        pages, page: the number of pages, and the rows per page.
        shapes: for each layer, the key/value heads, and head_dim of keys and of values.
        dtype, device: those of the tensors.
        form: one of `kernels.quantized.FORMATS`, if rows are stored in 8 bits: uint8 [..., d + 4].

    Attributes:
        pages, page, form: as given.
        layers: keys and values [pages, page, kv_heads, d] of each layer; by_head: other views of the same.
    """

    def __init__(
        self,
        pages: int,
        page: int,
        shapes: list[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        form: str | None = None,
    ) -> None:
        self.pages, self.page, self.form = pages, page, form
        self._rows = list[tuple[Tensor, Tensor]]()
        self.layers = list[tuple[Tensor, ...]]()
        self.by_head = list[LayerRows]()
        rows = pages * page
        for heads, *widths in shapes:
            if form:
                widths, dtype = [width + SCALE_BYTES for width in widths], torch.uint8
            key_dim, value_dim = widths
            keys = torch.empty(rows + 1, heads, key_dim, dtype=dtype, device=device)
            values = torch.empty(rows + 1, heads, value_dim, dtype=dtype, device=device)
            self._rows.append((keys, values))
            self.layers.append(tuple([x[:rows].unflatten(0, (pages, page)) for x in (keys, values)]))
            as_run = [x[:rows].transpose(0, 1).unsqueeze(0) for x in (keys, values)]
            as_pages = [x.transpose(1, 2) for x in self.layers[-1]]
            self.by_head.append(LayerRows(*as_run, *as_pages))

    def append(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores rows [rows, kv_heads, d] of a layer at `slots` int64 [rows]; padding after the last page."""
        for rows, x in zip(self._rows[layer], (keys, values), strict=True):
            rows.index_copy_(0, slots, pack(x, self.form) if self.form else x)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer [slots + 1, kv_heads, d] as they are stored, with one slot for padding."""
        return self._rows[layer]

    def rows(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, ...]:
        """Keys and values [rows, kv_heads, d] of a layer at `slots`, as they are stored; a view if it is a slice."""
        whole = self.stored(layer)
        return tuple([x[slots] if isinstance(slots, slice) else x.index_select(0, slots) for x in whole])

    def kernel(self, kernel: Kernel, key_dim: int, value_dim: int) -> Kernel:
        """A kernel that reads stored rows, from one for rows of these head_dims."""
        return QuantizedKernel(kernel, self.form, key_dim, value_dim) if self.form else kernel

    def copy(self, source: int, target: int) -> None:
        """Copies a page in all layers."""
        for layer in self.layers:
            for pages in layer:
                pages[target] = pages[source]
