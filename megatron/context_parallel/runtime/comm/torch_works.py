"""Operations of torch.distributed in flight: messages, and collectives that are faster with NCCL than messages."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.patches.torch_coalescing import as_one, can_coalesce

from .flight_recorder import Ends, recorder

MessageList = list[tuple[int, Tensor]]  # to or from a peer; tensors without rows are not sent

# Releases before 2.13 have only the older names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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
        recorder.waited(self.channel, self.ends, _reached())
        self.works = []


def _reached() -> torch.cuda.Event | None:
    """An event that the current stream of the GPU reaches after all waits so far.

    None without a GPU, and while a graph is captured: its events cannot be asked for.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class DeferredSend:
    """A message that starts when it is waited for: when the works before it are complete."""

    __slots__ = ("content", "group", "peer")

    def __init__(self, group: dist.ProcessGroup, peer: int, content: Tensor) -> None:
        self.group, self.peer, self.content = group, peer, content

    def wait(self) -> None:
        self.group.send([self.content], self.peer, 0).wait()


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


def all_gather(group: dist.ProcessGroup, tensors: Iterable[tuple[Tensor, Tensor]]) -> dist.Work:
    """Starts gathering each (mine, everyone), all in one collective."""
    with as_one(group, async_ops=True) as together:
        for mine, everyone in tensors:
            all_gather_single(everyone, mine, group=group)
    return together


def reduce_scatter(group: dist.ProcessGroup, tensors: Iterable[tuple[Tensor, Tensor]]) -> dist.Work:
    """Starts a reduce-scatter of each (mine, everyone), all in one collective."""
    with as_one(group, async_ops=True) as together:
        for mine, everyone in tensors:
            reduce_scatter_single(mine, everyone, group=group)
    return together
