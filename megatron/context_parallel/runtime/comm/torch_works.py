"""Operations of torch.distributed in flight: messages, and collectives that are faster with NCCL than messages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.patches.torch_coalescing import as_one, can_coalesce
from megatron.context_parallel.patches.torch_foreach import copy_each

from .flight_recorder import Ends, recorder

MessageList = list[tuple[int, Tensor]]  # to or from a peer; tensors without rows are not sent
ALIGNED = 16  # bytes; messages in a packed buffer start at a multiple, so that they can be viewed in their dtype

# Releases before 2.13 have only the older names.
gather_one = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
sum_one = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Work(Protocol):
    """Communication in flight. After `wait`, received data has arrived and sent data may change."""

    def wait(self) -> object: ...


class WorkBatch:
    """Works of torch.distributed. Each range ends with its own work, or all end with all works."""

    def __init__(self, works: Sequence[Work], channel: str, ends: Ends) -> None:
        self.works, self.channel, self.ends = works, channel, ends
        recorder.launch(channel, ends)

    def wait(self) -> None:
        if not self.works:
            return
        apart = len(self.works) == len(self.ends)
        noted: Ends = []
        try:
            for i, work in enumerate(self.works):
                ends = self.ends[i : i + 1] if apart else self.ends
                if ends != noted:
                    recorder.wait(self.channel, ends)
                    noted = ends
                work.wait()
        except RuntimeError as error:  # the recorder's position remains and names what failed
            raise RuntimeError(f"context parallel communication failed: {recorder.position}: {error}") from error
        recorder.waited(self.channel, self.ends)
        self.works = []


class Rounds:
    """Consecutive batches. The first starts at once, the others during `wait`."""

    def __init__(
        self, start: Callable[[MessageList, MessageList], Work], rounds: list[tuple[MessageList, MessageList]]
    ) -> None:
        self.start = start
        self.staged: list[tuple[Tensor, Tensor]] = []  # strided tensors and their receive buffers
        self.rounds: list[tuple[MessageList, MessageList]] = []
        for sends, receives in rounds:
            dense = [(to, x.contiguous()) for to, x in sends]
            self.rounds.append((dense, self._dense(receives)))
        self.work = start(*self.rounds.pop(0))

    def _dense(self, receives: MessageList) -> MessageList:
        """The same messages, with buffers instead of strided tensors."""
        found = []
        for peer, x in receives:
            buffer = x
            if not x.is_contiguous():
                buffer = x.new_empty(x.shape)
                self.staged.append((x, buffer))
            found.append((peer, buffer))
        return found

    def wait(self) -> None:
        self.work.wait()
        while self.rounds:
            self.work = self.start(*self.rounds.pop(0))
            self.work.wait()
        for x, buffer in self.staged:
            x.copy_(buffer)


def post(group: dist.ProcessGroup, sends: MessageList, receives: MessageList) -> list[dist.Work]:
    """Starts messages with ranks of a group; with NCCL, as one operation.

    It calls the group directly: `dist.batch_isend_irecv` does the same with four times the host work.
    """
    if not (sends or receives):
        return []
    device = (sends or receives)[0][1].device
    if can_coalesce(group, device):
        with as_one(group, device, async_ops=True) as together:
            _post(group, sends, receives)
        return [together]
    return _post(group, sends, receives)


def _post(group: dist.ProcessGroup, sends: MessageList, receives: MessageList) -> list[dist.Work]:
    # Receives first: otherwise gloo moves two crossing messages one after the other.
    works = [group.recv([x], peer, 0) for peer, x in receives]
    return works + [group.send([x], peer, 0) for peer, x in sends]


def gather(group: dist.ProcessGroup, tensors: Iterable[tuple[Tensor, Tensor]]) -> dist.Work:
    """Starts gathering each (mine, everyone), all in one collective."""
    with as_one(group, async_ops=True) as together:
        for mine, everyone in tensors:
            gather_one(everyone, mine, group=group)
    return together


def add_up(group: dist.ProcessGroup, tensors: Iterable[tuple[Tensor, Tensor]]) -> dist.Work:
    """Starts a reduce-scatter of each (mine, everyone), all in one collective."""
    with as_one(group, async_ops=True) as together:
        for mine, everyone in tensors:
            sum_one(mine, everyone, group=group)
    return together


class AllToAll:
    """Messages to and from each rank of a group, packed into one buffer each way.

    Args:
        sends, receives: (rank in the group, tensor), in the same order on both ends of a line. Tensors may be strided.
    """

    def __init__(self, group: dist.ProcessGroup, sends: MessageList, receives: MessageList) -> None:
        size = dist.get_world_size(group)
        parts, packed, sent = _packed(sends, size)
        self.parts, self.landed, received = _packed(receives, size)
        self.into = [x for _, x in sorted(receives, key=_peer)]
        copy_each(parts, [x for _, x in sorted(sends, key=_peer)])
        work = dist.all_to_all_single(self.landed, packed, received, sent, group=group, async_op=True)
        assert work is not None  # this rank is in the group
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        copy_each(self.into, self.parts)


def _peer(message: tuple[int, Tensor]) -> int:
    return message[0]


def _packed(messages: MessageList, size: int) -> tuple[list[Tensor], Tensor, list[int]]:
    """A buffer for messages, rank after rank: the view of each message, the buffer, and its bytes for each rank."""
    ordered = sorted(messages, key=_peer)
    counts = [0] * size
    sizes = [-(-x.numel() * x.element_size() // ALIGNED) * ALIGNED for _, x in ordered]
    for (peer, _), count in zip(ordered, sizes, strict=True):
        counts[peer] += count
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=ordered[0][1].device)
    parts = []
    start = 0
    for (_, x), size_of in zip(ordered, sizes, strict=True):
        used = buffer[start : start + x.numel() * x.element_size()]
        parts.append(used.view(x.dtype).view(x.shape))
        start += size_of
    return parts, buffer, counts
