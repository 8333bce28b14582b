"""The attention of a decode step on fixed buffers: gather the queries, attend, send the partial outputs home, merge."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.integration.spec import ContextParallelAttention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import Scores
from megatron.context_parallel.patches.torch_all_gather import all_gather
from megatron.context_parallel.runtime.comm.host_sockets import Exchange, HostSockets
from megatron.context_parallel.runtime.comm.torch_works import Work, WorkBatch
from megatron.context_parallel.runtime.sinks import add_sinks

from .cache import KVCache
from .cached_keys import attend_to
from .decode_rows import DecodeRows

CHANNEL = "decode"  # in the flight recorder


@dataclass(frozen=True)
class Heads:
    """The heads of a layer on this rank, and their sizes."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int


class DecodeAttention:
    """Stores the keys and values of a decode step's rows, and attends over all cached ones.

    It has two collectives: an all-gather of queries, and an all-to-all of partial outputs with their log-sum-exp. All
    shapes are those of the bucket. Only the keys change that a rank attends to.

    Args:
        cache: the cache of this rank.
        group: the context group.
        size: rows of each rank.
        heads: of each layer.
        sockets: connections to the other ranks, if all are on this host.
        dtype: of queries, keys and values.

    Attributes:
        slots: int64 [size], the slots of this rank's rows.
        everywhere: int64 [size], all of these rows.
        rows: the rows of the step.
    """

    rows: DecodeRows

    def __init__(
        self,
        cache: KVCache,
        group: ContextParallel,
        size: int,
        heads: Heads,
        sockets: HostSockets | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.cache, self.group, self.size, self.heads = cache, group, size, heads
        n = group.n
        wide = torch.promote_types(dtype, torch.float32)
        by_key = heads.keys, heads.queries // heads.keys
        width = heads.value_dim + 1
        self.slots = torch.zeros(size, dtype=torch.int64, device=device)
        self.everywhere = torch.arange(size, device=device)
        others = {i: rank for i, rank in enumerate(dist.get_process_group_ranks(group.group)) if i != group.rank}
        peers = others.values()
        self.ends = {"gather": [("gather", peer) for peer in peers], "receive": [("receive", peer) for peer in peers]}
        self.gathered = torch.zeros(n, size, heads.queries, heads.key_dim, dtype=dtype, device=device)
        # Partial outputs with their log-sum-exp behind them: of the rows of each rank, and of own rows from each rank.
        self.sent = torch.zeros(n, size, heads.queries, width, dtype=wide, device=device)
        self.parts = torch.zeros_like(self.sent) if n > 1 else self.sent
        self.mine, self.places = self.gathered[group.rank], [*self.sent]
        self.by_socket = dict[str, Exchange]()
        if sockets:  # what a rank sends to itself is there already
            self.places[group.rank] = self.parts[group.rank]
            queries = {i: self.gathered[i] for i in others}
            leaving, coming = {i: self.sent[i] for i in others}, {i: self.parts[i] for i in others}
            self.by_socket["gather"] = Exchange(sockets, dict.fromkeys(others, self.mine), queries)
            self.by_socket["receive"] = Exchange(sockets, leaving, coming)
        elif n > 1:
            self.mine = torch.zeros_like(self.mine)
        self.queries = [of_rank.view(size, *by_key, -1).unbind() for of_rank in self.gathered]
        # Of the rows of one rank; and of a row without keys.
        self.outs, self.lses = self.sent.new_zeros(size, *by_key, width - 1), self.sent.new_zeros(size, *by_key)
        self.nothing = self.outs.new_zeros(1, *by_key, width - 1), self.lses.new_full((1, *by_key), -torch.inf)
        self.targets = list[tuple[slice, list[Tensor]]]()
        self.part_outs, self.part_lses = self.parts[..., :-1], self.parts[..., -1]
        self.weights = torch.zeros_like(self.part_lses)
        self.weighted = torch.zeros_like(self.part_outs)
        self.merged, self.lse = torch.zeros_like(self.part_outs[0]), torch.zeros_like(self.part_lses[0])

    def begin(self, rows: DecodeRows, slots: Tensor) -> None:
        """Takes the rows of a step, and the slots of this rank's, int64 [size]."""
        self.rows = rows
        self.slots.copy_(slots)
        self.places[self.group.rank][len(rows.last) :].zero_()  # padding
        self.targets = []
        first = 0
        for place, sequences in zip(self.places, rows.of_ranks, strict=True):
            if count := len(sequences):
                by_key = place[:count].unflatten(1, self.outs.shape[1:3])
                tensors = [self.outs[:count], self.lses[:count], by_key[..., :-1], by_key[..., -1]]
                self.targets.append((slice(first, first + count), tensors))
                first += count

    def __call__(self, core: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of this rank's rows, with the shape of `q` and the head_dim of `v`.

        Args:
            q, k, v: [size, 1, heads, d].
        """
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty(*q.shape[:-1], v.shape[-1])
        self.write(core, q[:, 0], k[:, 0], v[:, 0], out[:, 0])
        return out

    def write(self, core: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """The same on [size, heads, d], into `out`."""
        layer = core.layer_number - 1
        self.cache.append(layer, self.slots, k, v)
        self.mine.copy_(q)
        if self.group.n > 1:
            self._wait("gather")
        self._attend(core, layer)
        if self.group.n > 1:
            self._wait("receive")
        out.copy_(self._merged(core.softmax_offset))

    def _wait(self, kind: str) -> None:
        """Sends the queries of this rank to all others (gather), or partial outputs home (receive)."""
        WorkBatch([self.by_socket.get(kind) or self._start(kind)], CHANNEL, self.ends[kind]).wait()

    def _start(self, kind: str) -> Work:
        if kind == "gather":
            return all_gather(self.group.group, self.gathered.flatten(0, 1), self.mine)
        return self.group.group.alltoall_base(self.parts, self.sent, [], [])

    def _attend(self, core: ContextParallelAttention, layer: int) -> None:
        """Computes the partial output of each row, and copies those of each rank to where they are sent from."""
        of_layer = self.cache.by_head[layer]
        sizes = self.heads.key_dim, self.heads.value_dim
        kernel = kernel_for(self.mine.device, self.mine.dtype, sizes[0], core.backend, value_dim=sizes[1])
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

    def _merged(self, sinks: Tensor | None) -> Tensor:
        """The outputs [size, heads, dv] of this rank's rows, from their parts."""
        if self.group.n == 1 and sinks is None:
            return self.part_outs[0]
        torch.softmax(self.part_lses, 0, out=self.weights)
        torch.mul(self.part_outs, self.weights.unsqueeze(-1), out=self.weighted)
        torch.sum(self.weighted, 0, out=self.merged)
        if sinks is not None:
            torch.logsumexp(self.part_lses, 0, out=self.lse)
            add_sinks(self.merged.unsqueeze(1), self.lse.unsqueeze(1), sinks)
        return self.merged
