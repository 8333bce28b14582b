"""The attention of a decode step on fixed buffers: gather the queries, attend, send the partial outputs home, merge."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.integration.spec import ContextParallelAttention
from megatron.context_parallel.patches.torch_all_gather import all_gather
from megatron.context_parallel.runtime.comm.host_sockets import Exchange, HostSockets
from megatron.context_parallel.runtime.comm.torch_works import Work, WorkBatch

from .cache import KVCache
from .decode_pages import DecodePages, can_attend_to_pages
from .decode_ranges import DecodeRanges
from .decode_rows import DecodeRows
from .heads import Heads

CHANNEL = "decode"  # in the flight recorder


class DecodeAttention:
    """Stores the keys and values of a decode step's rows, and attends over all cached ones.

    It has two collectives: an all-gather of queries, and an all-to-all of partial outputs with their log-sum-exp. All
    shapes are those of the bucket. Only the keys change that a rank attends to.

    Args:
        cache: the cache of this rank.
        group: the context group.
        size: rows of each rank.
        heads: of each layer; cores: the attention of each layer.
        sockets: connections to the other ranks, if all are on this host.
        dtype: of queries, keys and values.

    Attributes:
        slots: int64 [size], the slots of this rank's rows.
        everywhere: int64 [size], all of these rows.
    """

    def __init__(
        self,
        cache: KVCache,
        group: ContextParallel,
        size: int,
        heads: Heads,
        cores: list[ContextParallelAttention],
        sockets: HostSockets | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.cache, self.group, self.size = cache, group, size
        n = group.n
        wide = torch.promote_types(dtype, torch.float32)
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
        self.weight = self.parts.new_zeros(size, heads.queries)  # of all keys beside a sink
        self.keys: DecodePages | DecodeRanges
        if can_attend_to_pages(cache, heads, cores, dtype, device):
            self.keys = DecodePages(cache, heads, cores, self.gathered, self.sent, self.parts)
        else:
            self.keys = DecodeRanges(cache, heads, self.gathered, self.places, self.parts)

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph may have it: it has fixed tensors, and no messages."""
        return self.group.n == 1 and isinstance(self.keys, DecodePages)

    def begin(self, rows: DecodeRows, slots: Tensor) -> None:
        """Takes the rows of a step, and the slots of this rank's, int64 [size]."""
        self.slots.copy_(slots)
        self.keys.begin(rows)

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
        self.keys.attend(core)
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

    def _merged(self, sinks: Tensor | None) -> Tensor:
        """The outputs [size, heads, dv] of this rank's rows, from their parts."""
        if self.group.n == 1 and sinks is None:
            return self.parts[0, ..., :-1]
        merged = self.keys.merged()
        if sinks is not None:  # as `add_sinks`, in a buffer
            torch.sub(self.keys.merged_lse(), sinks, out=self.weight)
            merged.mul_(self.weight.sigmoid_().nan_to_num_(0.0).unsqueeze(-1))
        return merged
