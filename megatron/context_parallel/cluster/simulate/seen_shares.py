"""What the chunks of a layout see of each other under a mask."""

from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy
import torch

from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask

SAMPLES = 32  # queries of a progression that stand for the others
THOUSANDTHS = 1000  # of the pairs of rows of two chunks
SMALL = 64  # rows of a progression in the small sequence that shows how blocks are cut
KEPT_LAYOUTS = 32  # ways in which tokens lie on ranks: a search tries each layout with several numbers of chunks


class Kinds(NamedTuple):
    """The blocks of two chunks by kind: those of a kind see equal shares of their pairs of rows.

    Attributes:
        of_pair: the number of its kind, [query chunk, key chunk].
        examples: the first block of each kind.
    """

    of_pair: numpy.ndarray
    examples: list[tuple[int, int]]


class SeenShares:
    """What the chunks of a layout see of each other under a mask: the same for all passes, strategies and devices."""

    def __init__(self, layout: str, n: int, mask: Mask, length: int) -> None:
        self.mask = mask
        self.chunks = Chunks.of(layout, n, length)
        self.keys = numpy.array([p for chunk in self.chunks.progressions for p in chunk]).T
        self.rows = length / n
        self.small = small_blocks(layout, n, mask, length)
        self.seen, self.order = cache(self._seen), cache(self._order)

    @cached_property
    def kinds(self) -> Kinds:
        """All blocks of two chunks."""
        n = self.chunks.n
        of_pair = numpy.empty((n, n), numpy.int32)
        numbers: dict[int, int] = {}
        examples = list[tuple[int, int]]()
        for q in range(n):
            shares = self._seen(q).transpose(1, 0, 2).reshape(n, -1)
            keys = shares.astype(numpy.int64) @ ((THOUSANDTHS + 1) ** numpy.arange(shares.shape[1]))
            own, first, which = numpy.unique(keys, return_index=True, return_inverse=True)
            for key, kv in zip(own.tolist(), first.tolist(), strict=True):
                if numbers.setdefault(key, len(examples)) == len(examples):
                    examples.append((q, kv))
            of_pair[q] = numpy.array([numbers[key] for key in own.tolist()])[which]
        return Kinds(of_pair, examples)

    def _order(self, kv_chunks: tuple[int, ...]) -> numpy.ndarray:
        """The progressions of gathered chunks, counted over all chunks, in the order of their starts."""
        starts = self.keys[0].reshape(self.chunks.n, -1)
        each = starts.shape[1]
        own = (numpy.array(kv_chunks)[:, None] * each + numpy.arange(each)).ravel()
        order: numpy.ndarray = own[numpy.argsort(starts.ravel()[own])]
        return order

    def _seen(self, q: int) -> numpy.ndarray:
        """Thousandths of the pairs of rows that query chunk q sees, at least one where it sees any.

        Returns:
            int16, [its progressions, chunks, progressions of a chunk].
        """
        shares = []
        for rows in self.chunks.progressions[q]:
            count = min(SAMPLES, rows.length)
            # Every other one is rounded down, so that their mean is that of all.
            places = torch.tensor([int((i + 0.5) * rows.length / count - i % 2 / 2) for i in range(count)])
            first, end = (bound[0].numpy() for bound in self.mask.seen(rows.start + places * rows.stride))
            seen = self._before(numpy.maximum(first, end)) - self._before(first)
            shares.append((rows.length / count / self.rows**2 * seen).reshape(self.chunks.n, -1))
        all_shares = numpy.stack(shares)
        return numpy.maximum((all_shares * THOUSANDTHS).round(), all_shares > 0).astype(numpy.int16)

    def _before(self, bounds: numpy.ndarray) -> numpy.ndarray:
        """The keys of each progression before a bound, the sum over all bounds, [progressions of all chunks]."""
        start, stride, length = self.keys
        if not bounds.any():
            return numpy.zeros_like(start)
        if (stride > 1).any():
            return (-((start - bounds[:, None]) // stride)).clip(0, length).sum(0)
        bounds = numpy.sort(bounds)
        sums = numpy.concatenate([[0], bounds.cumsum()])
        beyond = numpy.searchsorted(bounds, start)  # the first bound with keys before it
        after = numpy.searchsorted(bounds, start + length)  # the first with all of them
        return sums[after] - sums[beyond] - (after - beyond) * start + (len(bounds) - after) * length


@lru_cache(KEPT_LAYOUTS)
def seen_shares(layout: str, n: int, mask: Mask, length: int) -> SeenShares:
    """Those of n chunks. Results are kept."""
    return SeenShares(layout, n, mask, length)


def small_blocks(layout: str, n: int, mask: Mask, length: int) -> Blocks:
    """The blocks of a short but otherwise equal sequence."""
    small = length if mask.documents else min(length, 2 * n * SMALL)
    before, after = (-1 if side < 0 else -(-side * small // length) for side in mask.window)
    chunks = Chunks.of(layout, n, small)
    return Blocks(replace(mask, window=(before, after)), chunks, chunks, AtenFlash())
