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
        self.mine = torch.zeros(size, heads.queries, heads.key_dim, dtype=dtype, device=device)
        self.gathered = torch.zeros(n * size, *self.mine.shape[1:], dtype=dtype, device=device)
        # Partial outputs with their log-sum-exp behind them: of the rows of each rank, and of own rows from each rank.
        self.sent = torch.zeros(n, size, heads.queries, width, dtype=wide, device=device)
        self.parts = torch.zeros_like(self.sent) if n > 1 else self.sent
        # Of the rows of one rank, before they are copied to `sent`; and of a row without keys.
        self.outs, self.lses = self.sent.new_zeros(size, *by_key, width - 1), self.sent.new_zeros(size, *by_key)
        self.nothing = self.outs.new_zeros(1, *by_key, width - 1), self.lses.new_full((1, *by_key), -torch.inf)
        self.places = list[tuple[slice, list[Tensor]]]()
        queries = self.gathered if n > 1 else self.mine
        self.queries = [part.view(size, *by_key, -1).unbind() for part in queries.split(size)]
        self.peak, self.total = (self.parts.new_zeros(size, heads.queries) for _ in range(2))
        self.weights = self.parts.new_zeros(n, size, heads.queries)
        self.merged = self.parts.new_zeros(size, heads.queries, heads.value_dim)
        self.weighted = self.parts.new_zeros(n, size, heads.queries, heads.value_dim)
        self.others = {i: rank for i, rank in enumerate(dist.get_process_group_ranks(group.group)) if i != group.rank}
        self.queries_by_socket: Exchange | None = None
        self.parts_by_socket: Exchange | None = None
        if sockets:
            by_rank = self.gathered.split(size)
            received = {i: by_rank[i] for i in self.others}
            self.queries_by_socket = Exchange(sockets, dict.fromkeys(self.others, self.mine), received)
            leaving, arriving = ({i: x[i] for i in self.others} for x in (self.sent, self.parts))
            self.parts_by_socket = Exchange(sockets, leaving, arriving)

    def begin(self, rows: DecodeRows, slots: Tensor) -> None:
        """Takes the rows of a step, and the slots of this rank's, int64 [size]."""
        self.rows = rows
        self.slots.copy_(slots)
        self.sent[self.group.rank, len(rows.last) :].zero_()  # padding
        self.places = []
        by_key = self.sent.view(*self.sent.shape[:2], *self.outs.shape[1:3], -1)
        first = 0
        for rank, count in enumerate(map(len, rows.of_ranks)):
            if count:
                sent = by_key[rank, :count]
                buffers = [self.outs[:count], self.lses[:count], sent[..., :-1], sent[..., -1]]
                self.places.append((slice(first, first + count), buffers))
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
            self._wait("gather", self._gather())
        self._attend(core, layer)
        if self.group.n > 1:
            self._wait("receive", self._send_home())
        out.copy_(self._merged(core.softmax_offset))

    def _gather(self) -> Work:
        """Sends the queries of this rank to all others."""
        if not self.queries_by_socket:
            return all_gather(self.group.group, self.gathered, self.mine)
        self.gathered[self.group.rank * self.size :][: self.size].copy_(self.mine)
        return self.queries_by_socket

    def _send_home(self) -> Work:
        """Sends the partial outputs of each rank's rows to it."""
        if not self.parts_by_socket:
            return self.group.group.alltoall_base(self.parts, self.sent, [], [])
        self.parts[self.group.rank].copy_(self.sent[self.group.rank])
        return self.parts_by_socket

    def _wait(self, kind: str, work: Work) -> None:
        WorkBatch([work], CHANNEL, [(kind, rank) for rank in self.others.values()]).wait()

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
        for of_rank, (outs, lses, sent_outs, sent_lses) in self.places:
            parts = zip(*results[of_rank], strict=True)
            torch.cat(next(parts), out=outs)
            torch.cat(next(parts), out=lses)
            sent_outs.copy_(outs)
            sent_lses.copy_(lses)

    def _merged(self, sinks: Tensor | None) -> Tensor:
        """The outputs [size, heads, dv] of this rank's rows, from their parts."""
        if self.group.n == 1 and sinks is None:
            return self.parts[0, ..., :-1]
        lse = self.parts[..., -1]
        torch.amax(lse, 0, out=self.peak)
        torch.sub(lse, self.peak, out=self.weights).exp_()
        torch.sum(self.weights, 0, out=self.total)
        torch.mul(self.parts[..., :-1], self.weights.unsqueeze(-1), out=self.weighted)
        torch.sum(self.weighted, 0, out=self.merged).div_(self.total.unsqueeze(-1))
        if sinks is not None:
            lse = self.total.log_().add_(self.peak)
            add_sinks(self.merged.unsqueeze(1), lse.unsqueeze(1), sinks)
        return self.merged
