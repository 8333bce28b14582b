"""Attention of one query over cached keys where they lie."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.interface import Kernel, Scores
from megatron.context_parallel.kernels.masks import FULL

from .pages import KeyRows


def attend_to(
    seen: KeyRows, q: Tensor, keys: Tensor, values: Tensor, kernel: Kernel, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The output [kv_heads, group, dv] of a query, in float32 or wider, and its log-sum-exp [kv_heads, group].

    Args:
        seen: the rows of the keys, 1 or more. They are not copied.
        q: [kv_heads, group, d].
        keys, values: all pages of a layer, [pages, page, kv_heads, d].
    """
    if len(seen.rows) == 1 and not seen.pages:  # the usual case, with few calls
        keys, values = (x.flatten(0, 1)[seen.rows[0]] for x in (keys, values))
        out, lse = kernel.forward(q.unsqueeze(0), keys, values, FULL, scores)
        return out[0], lse[0]
    results = [*_of_rows(seen, q, keys, values, kernel, scores), *_of_pages(seen, q, keys, values, kernel, scores)]
    outs, lses = map(torch.cat, zip(*results, strict=True))
    return outs.mul_(lses.softmax(0).unsqueeze(-1)).sum(0), lses.logsumexp(0)


def _of_rows(
    seen: KeyRows, q: Tensor, keys: Tensor, values: Tensor, kernel: Kernel, scores: Scores
) -> Iterator[tuple[Tensor, Tensor]]:
    """The partial output [1, kv_heads, group, dv] over each run of rows, and its log-sum-exp."""
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    for rows in seen.rows:
        yield kernel.forward(q.unsqueeze(0), keys[rows], values[rows], FULL, scores)


def _of_pages(
    seen: KeyRows, q: Tensor, keys: Tensor, values: Tensor, kernel: Kernel, scores: Scores
) -> Iterator[tuple[Tensor, Tensor]]:
    """The partial outputs [pages, kv_heads, group, dv] over whole pages, and their log-sum-exp."""
    for pages in seen.pages:
        if isinstance(kernel, AtenFlash):
            yield kernel.forward_pages(q, keys[pages], values[pages], scores)
        else:
            for page in range(pages.start, pages.stop, pages.step):
                yield kernel.forward(q.unsqueeze(0), keys[page], values[page], FULL, scores)
