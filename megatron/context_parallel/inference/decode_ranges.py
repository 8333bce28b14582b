"""The attention of decode rows over ranges of cached keys: a call for each row and range, on any device."""

import torch
from torch import Tensor

from megatron.context_parallel.integration.spec import ContextParallelAttention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import Scores

from .cache import KVCache
from .cached_keys import attend_to
from .decode_rows import DecodeRows
from .heads import Heads


class DecodeRanges:
    """Computes the partial output of each row over the keys of this rank, and merges those of this rank's rows.

    Args:
        cache: the cache of this rank; heads: of each layer.
        gathered: [n, size, heads, d], the queries of all ranks.
        places: for each rank [size, heads, dv + 1] in float32 or wider, where the outputs of its rows go, with their
            log-sum-exp behind them.
        parts: [n, size, heads, dv + 1], the partial outputs of this rank's rows from all ranks.
    """

    rows: DecodeRows

    def __init__(self, cache: KVCache, heads: Heads, gathered: Tensor, places: list[Tensor], parts: Tensor) -> None:
        self.cache, self.heads, self.places = cache, heads, places
        self.device, self.dtype = gathered.device, gathered.dtype
        size = gathered.shape[1]
        by_key = heads.keys, heads.queries // heads.keys
        self.queries = [of_rank.view(size, *by_key, -1).unbind() for of_rank in gathered]
        # Of the rows of one rank; and of a row without keys.
        self.outs, self.lses = parts.new_zeros(size, *by_key, heads.value_dim), parts.new_zeros(size, *by_key)
        self.nothing = self.outs.new_zeros(1, *by_key, heads.value_dim), self.lses.new_full((1, *by_key), -torch.inf)
        self.targets = list[tuple[slice, list[Tensor]]]()
        self.part_outs, self.part_lses = parts[..., :-1], parts[..., -1]
        self.weights = torch.zeros_like(self.part_lses)
        self.weighted = torch.zeros_like(self.part_outs)
        self.out, self.lse = torch.zeros_like(self.part_outs[0]), torch.zeros_like(self.part_lses[0])

    def begin(self, rows: DecodeRows) -> None:
        """Takes the rows of a step."""
        self.rows = rows
        self.places[rows.rank][len(rows.last) :].zero_()  # padding
        self.targets = []
        first = 0
        for place, sequences in zip(self.places, rows.of_ranks, strict=True):
            if count := len(sequences):
                by_key = place[:count].unflatten(1, self.outs.shape[1:3])
                tensors = [self.outs[:count], self.lses[:count], by_key[..., :-1], by_key[..., -1]]
                self.targets.append((slice(first, first + count), tensors))
                first += count

    def attend(self, core: ContextParallelAttention) -> None:
        """Computes the partial outputs of a layer."""
        of_layer = self.cache.by_head[core.layer_number - 1]
        sizes = self.heads.key_dim, self.heads.value_dim
        kernel = kernel_for(self.device, self.dtype, sizes[0], core.backend, value_dim=sizes[1])
        kernel = self.cache.kernel(kernel, *sizes)
        scores = Scores(core.scale)
        results = []
        for rank, row, seen in self.rows.keys(core.window[0]):
            some = seen.rows or seen.pages
            results.append(attend_to(seen, self.queries[rank][row], of_layer, kernel, scores) if some else self.nothing)
        for of_rank, (outs, lses, sent_outs, sent_lses) in self.targets:
            parts = zip(*results[of_rank], strict=True)
            torch.cat(next(parts), out=outs)
            torch.cat(next(parts), out=lses)
            sent_outs.copy_(outs)
            sent_lses.copy_(lses)

    def merged(self) -> Tensor:
        """The outputs [size, heads, dv] of this rank's rows."""
        torch.softmax(self.part_lses, 0, out=self.weights)
        torch.mul(self.part_outs, self.weights.unsqueeze(-1), out=self.weighted)
        return torch.sum(self.weighted, 0, out=self.out)

    def merged_lse(self) -> Tensor:
        """Their log-sum-exp [size, heads], after `merged`."""
        return torch.logsumexp(self.part_lses, 0, out=self.lse)
