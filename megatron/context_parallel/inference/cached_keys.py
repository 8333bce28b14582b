"""Attention of one query over cached keys where they lie."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.interface import Kernel, Scores
from megatron.context_parallel.kernels.masks import FULL

from .pages import KeyRows


class LayerRows(NamedTuple):
    """Views of all keys and values of a layer, as one range of rows and as pages.

    Attributes:
        keys, values: [1, kv_heads, rows, d].
        page_keys, page_values: [pages, kv_heads, page, d].
    """

    keys: Tensor
    values: Tensor
    page_keys: Tensor
    page_values: Tensor

    def rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, rows, d] of a range of rows."""
        of_rows = 2, rows.start, rows.stop - rows.start
        return self.keys.narrow(*of_rows), self.values.narrow(*of_rows)

    def pages(self, pages: slice) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, kv_heads, page, d] of some pages."""
        return self.page_keys[pages], self.page_values[pages]


def attend_to(seen: KeyRows, q: Tensor, layer: LayerRows, kernel: Kernel, scores: Scores) -> tuple[Tensor, Tensor]:
    """The output [1, kv_heads, group, dv] of a query, in float32 or wider, and its log-sum-exp [1, kv_heads, group].

    Args:
        seen: the rows of the keys, 1 or more. They are not copied.
        q: [kv_heads, group, d].
    """
    if len(seen.rows) == 1 and not seen.pages and isinstance(kernel, AtenFlash):  # the usual case, with few calls
        return kernel.forward_parts(q, *layer.rows(seen.rows[0]), scores)
    outs, lses = map(torch.cat, zip(*_parts(seen, q, layer, kernel, scores), strict=True))
    return outs.mul_(lses.softmax(0).unsqueeze(-1)).sum(0, True), lses.logsumexp(0, True)


def _parts(
    seen: KeyRows, q: Tensor, layer: LayerRows, kernel: Kernel, scores: Scores
) -> Iterator[tuple[Tensor, Tensor]]:
    """Partial outputs [parts, kv_heads, group, dv] over each range of rows and over whole pages, and log-sum-exps."""
    for keys, values in [*map(layer.rows, seen.rows), *map(layer.pages, seen.pages)]:
        if isinstance(kernel, AtenFlash):
            yield kernel.forward_parts(q, keys, values, scores)
            continue
        for k, v in zip(keys, values, strict=True):
            yield kernel.forward(q.unsqueeze(0), k.transpose(0, 1), v.transpose(0, 1), FULL, scores)
