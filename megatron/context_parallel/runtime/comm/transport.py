"""Sends chunks through torch.distributed, or between ranks in this process."""

from collections import deque
from collections.abc import Generator, Iterable
from itertools import chain
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.patches.torch_write_counter import writes_to
from megatron.context_parallel.plan.ir import Plan, PlanError

from . import torch_works
from .communicators import new_communicator, rendezvous
from .torch_works import DeferredSend, MessageList, Work, WorkBatch, all_gather_single, post

Result = TypeVar("Result")
Group = tuple[int, ...]  # ranks
Gathered = tuple[Tensor, Tensor]  # of a collective: the tensor of one rank, and that of all ranks
Program = Generator[Work, None, Result]  # a rank's execution of a plan: yields the work to wait for


class Transport(Protocol):
    """The transport of one rank. Peers and groups are ranks of the context group (for a `Subgroup`, its own ranks)."""

    can_reduce: bool  # whether it has a reduce-scatter that sends no more bytes than messages do

    def world_rank(self, peer: int) -> int:
        """The world rank of a peer."""
        ...

    def exchange(self, channel: str, sends: MessageList, receives: MessageList) -> Work:
        """Starts one batch of messages. Between two ranks, messages match in order."""
        ...

    def all_to_all(self, channel: str, group: Group, sent: Tensor, received: Tensor, at_once: bool = False) -> Work:
        """Starts an exchange with each other rank of `group`: row i of `sent` and `received` is for the i-th of them.

        Both are uint8 [len(group) - 1, bytes], contiguous. Unless `at_once`, wait for it soon: it continues only while
        this rank waits.
        """
        ...

    def all_gather(self, channel: str, group: Group, rows: tuple[int, ...], tensors: list[Gathered]) -> Work:
        """Starts gathering, for each (mine, everyone), `mine` [rows, ...] of all ranks of `group` into `everyone`.

        `rows` are the rows of each rank of `group`; `everyone` is [sum(rows), ...], in the order of `group`.
        """
        ...

    def reduce_scatter(self, channel: str, group: Group, tensors: list[Gathered]) -> Work:
        """Starts a reduce-scatter, for each (mine, everyone), of `everyone` of all ranks into `mine` of each.

        `everyone` is [len(group) * rows, ...], in the order of `group`. Call it only if `can_reduce`.
        """
        ...


class TorchTransport:
    """torch.distributed (NCCL or gloo). Each channel is a separate communicator."""

    def __init__(self, group: dist.ProcessGroup, given: str) -> None:
        """Waits for the other ranks of `group`; `given` must be the same on all (see `rendezvous`)."""
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self._everyone = tuple(range(len(self.ranks)))
        self._parent = group
        self._name = rendezvous(group, given)
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._known = WeakSet[Plan]()  # to `connect_peers`
        self._connected = set[tuple[str, int, int]]()  # channel, sender and receiver
        self.can_reduce = self.nccl = "nccl" in dist.get_backend_config(group)

    def connect(self, communicators: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Creates communicators, each a channel and its ranks. All ranks of the group must request the same ones."""
        for channel, members in sorted(communicators):
            if self.rank not in members:
                continue
            if members == self._everyone and self._parent not in self._groups.values():
                group = self._parent
            else:
                group = new_communicator(self._parent, [self.ranks[m] for m in members], self._name, channel)
            if self.nccl:  # NCCL must connect all ranks in its first call
                dist.barrier(group, device_ids=[torch.cuda.current_device()])
            self._groups[channel, members] = group

    def connect_peers(self, plan: Plan) -> None:
        """Sends a byte where a plan sends for the first time. All ranks of the group call it, with the same plans.

        NCCL connects two ranks in their first message, and each waits there for the other. So a plan could hang.
        """
        if not self.nccl or plan in self._known:
            return
        self._known.add(plan)
        messages = plan.messages(self.rank) - self._connected
        self._connected |= messages
        device = "cuda" if torch.cuda.is_available() else "cpu"
        channels: dict[str, tuple[MessageList, MessageList]] = {}
        for channel, sender, receiver in sorted(messages):
            sends, receives = channels.setdefault(channel, ([], []))
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            if sender == self.rank:
                sends.append((receiver, byte))
            else:
                receives.append((sender, byte))
        for channel, (sends, receives) in channels.items():
            self.exchange(channel, sends, receives).wait()

    def world_rank(self, peer: int) -> int:
        return self.ranks[peer]

    def _group(self, channel: str, members: Group) -> dist.ProcessGroup:
        if (channel, members) not in self._groups:
            declared = sorted({c for c, _ in self._groups})
            advice = f"declare the channel where the strategy is registered; declared are {declared}"
            if channel in declared:
                advice = "give a collective the groups that it has without a window and documents"
            raise PlanError(f"channel {channel!r} of ranks {list(members)}: no communicator; {advice}")
        return self._groups[channel, members]

    def exchange(self, channel: str, sends: MessageList, receives: MessageList) -> Work:
        return self._exchange(channel, self._everyone, sends, receives)

    def _exchange(self, channel: str, members: Group, sends: MessageList, receives: MessageList) -> Work:
        """Starts one batch of messages on a communicator."""
        group = self._group(channel, members)
        ranks = self.ranks
        sends = [(peer, x) for peer, x in sends if x.numel()]
        receives = [(peer, x) for peer, x in receives if x.numel()]
        ends = [("receive", ranks[peer]) for peer, _ in receives] + [("send", ranks[peer]) for peer, _ in sends]
        if members is not self._everyone:
            sends = [(members.index(peer), x) for peer, x in sends]
            receives = [(members.index(peer), x) for peer, x in receives]
        return WorkBatch(post(group, sends, receives), channel, ends)

    def all_to_all(self, channel: str, group: Group, sent: Tensor, received: Tensor, at_once: bool = False) -> Work:
        communicator = self._group(channel, self._everyone)
        others = _others(self.rank, group)
        ends = [("receive", self.ranks[peer]) for peer in others]
        if self.nccl:
            rows = [int(peer in others) for peer in self._everyone]
            work = dist.all_to_all_single(received, sent, rows, rows, group=communicator, async_op=True)
            assert work is not None  # this rank is in the group
            return WorkBatch([work], channel, ends)
        if at_once:
            messages = list(zip(others, sent.unbind(), strict=True)), list(zip(others, received.unbind(), strict=True))
            return WorkBatch(post(communicator, *messages), channel, [*ends, *(("send", rank) for _, rank in ends)])
        receives = post(communicator, [], list(zip(others, received.unbind(), strict=True)))
        # One send after the other, each rank's first to the next rank: all at once are up to a tenth slower over gloo.
        sends = [DeferredSend(communicator, *message) for message in zip(others, sent.unbind(), strict=True)]
        first = group.index(self.rank)
        sends = sends[first:] + sends[:first]
        turns = [("send", self.ranks[send.peer]) for send in sends]
        return WorkBatch([*sends, *receives], channel, turns + ends)

    def all_gather(self, channel: str, group: Group, rows: tuple[int, ...], tensors: list[Gathered]) -> Work:
        if len(set(rows)) > 1:  # collectives need equal parts
            return self._exchange(channel, group, *_as_messages(self.rank, group, rows, tensors))
        communicator = self._group(channel, group)
        if self.nccl:
            works = [torch_works.all_gather(communicator, tensors)]
        else:
            works = [all_gather_single(all_, mine, group=communicator, async_op=True) for mine, all_ in tensors]
        return WorkBatch(works, channel, [("gather", self.ranks[rank]) for rank in group if rank != self.rank])

    def reduce_scatter(self, channel: str, group: Group, tensors: list[Gathered]) -> Work:
        work = torch_works.reduce_scatter(self._group(channel, group), tensors)
        return WorkBatch([work], channel, [("receive", self.ranks[rank]) for rank in group if rank != self.rank])


def _others(rank: int, group: Group) -> list[int]:
    return [peer for peer in group if peer != rank]


def _as_messages(
    rank: int, group: Group, rows: tuple[int, ...], tensors: list[Gathered]
) -> tuple[MessageList, MessageList]:
    """The sends and receives of a rank in a gather; its own part is copied at once."""
    sends: MessageList = []
    receives: MessageList = []
    for mine, everyone in tensors:
        for peer, part in zip(group, everyone.split(rows), strict=True):
            if peer == rank:
                part.copy_(mine)
            else:
                sends.append((peer, mine))
                receives.append((peer, part))
    return sends, receives


class _Message:
    """A message inside the process. As on a network, it is complete when both ends have posted their tensor.

    The end that waits first copies it. Overwriting the tensor before that is an error.
    """

    __slots__ = ("complete", "content", "into", "version")

    def __init__(self) -> None:
        self.content: Tensor | None = None
        self.into: Tensor | None = None
        self.version = 0
        self.complete = False

    def deliver(self) -> None:
        assert self.content is not None and self.into is not None  # only complete messages are delivered
        if writes_to(self.content) != self.version:
            raise PlanError("a tensor was overwritten while it was being sent")
        if self.content.shape != self.into.shape:
            raise PlanError(f"a tensor of {list(self.content.shape)} was sent for one of {list(self.into.shape)}")
        self.into.copy_(self.content)
        self.content = self.into = None


class MessageQueue:
    """Messages from one rank to another on a channel. They match in order; either end may post its tensor first."""

    __slots__ = ("sent", "wanted")

    def __init__(self) -> None:
        self.sent: deque[_Message] = deque()
        self.wanted: deque[_Message] = deque()

    def send(self, content: Tensor) -> _Message:
        if self.wanted:
            message = self.wanted.popleft()
            message.complete = True
        else:
            self.sent.append(message := _Message())
        message.content, message.version = content, writes_to(content)
        return message

    def receive(self, into: Tensor) -> _Message:
        if self.sent:
            message = self.sent.popleft()
            message.complete = True
        else:
            self.wanted.append(message := _Message())
        message.into = into
        return message


class _Exchange:
    """A batch of messages of one rank on a channel, each with a peer."""

    __slots__ = ("channel", "messages", "peers")

    def __init__(self, channel: str, messages: list[_Message], peers: list[int]) -> None:
        self.channel, self.messages, self.peers = channel, messages, peers

    def missing(self) -> str:
        """The first message whose other end is missing; nothing if the batch is complete."""
        for message, peer in zip(self.messages, self.peers, strict=False):  # after a wait there are no messages
            if not message.complete:
                what = "send to" if message.into is None else "receive from"
                return f"to {what} rank {peer} on channel {self.channel}"
        return ""

    def ready(self) -> bool:
        for message in self.messages:  # noqa: SIM110 (`all` takes three times as long)
            if not message.complete:
                return False
        return True

    def wait(self) -> None:
        for message in self.messages:
            if message.content is not None:  # otherwise the other end has copied it
                message.deliver()
        self.messages = []


class LocalTransport:
    """The transport between ranks in this process; they share `queues`, a `defaultdict(MessageQueue)`."""

    can_reduce = False

    def __init__(self, rank: int, queues: dict[tuple[str, int, int], MessageQueue]) -> None:
        self.rank, self.queues = rank, queues  # by channel, sender and receiver

    def world_rank(self, peer: int) -> int:
        return peer

    def exchange(self, channel: str, sends: MessageList, receives: MessageList) -> _Exchange:
        rank, queues = self.rank, self.queues
        messages = [queues[channel, rank, peer].send(x) for peer, x in sends]
        messages += [queues[channel, peer, rank].receive(x) for peer, x in receives]
        return _Exchange(channel, messages, [peer for peer, _ in chain(sends, receives)])

    def all_to_all(self, channel: str, group: Group, sent: Tensor, received: Tensor, at_once: bool = False) -> Work:
        others = _others(self.rank, group)
        sends = list(zip(others, sent.unbind(), strict=True))
        return self.exchange(channel, sends, list(zip(others, received.unbind(), strict=True)))

    def all_gather(self, channel: str, group: Group, rows: tuple[int, ...], tensors: list[Gathered]) -> _Exchange:
        return self.exchange(channel, *_as_messages(self.rank, group, rows, tensors))


class Subgroup:
    """Some ranks of a transport, numbered 0, 1, ... in the order given."""

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        self.transport = transport
        self.ranks = ranks
        self.can_reduce = transport.can_reduce

    def world_rank(self, peer: int) -> int:
        return self.transport.world_rank(self.ranks[peer])

    def exchange(self, channel: str, sends: MessageList, receives: MessageList) -> Work:
        return self.transport.exchange(channel, self._outside(sends), self._outside(receives))

    def all_to_all(self, channel: str, group: Group, sent: Tensor, received: Tensor, at_once: bool = False) -> Work:
        return self.transport.all_to_all(channel, tuple(self.ranks[r] for r in group), sent, received, at_once)

    def _outside(self, messages: MessageList) -> MessageList:
        return [(self.ranks[peer], x) for peer, x in messages]

    def all_gather(self, channel: str, group: Group, rows: tuple[int, ...], tensors: list[Gathered]) -> Work:
        return self.transport.all_gather(channel, tuple(self.ranks[r] for r in group), rows, tensors)

    def reduce_scatter(self, channel: str, group: Group, tensors: list[Gathered]) -> Work:
        return self.transport.reduce_scatter(channel, tuple(self.ranks[r] for r in group), tensors)


def run_rank(program: Program[Result]) -> Result:
    """Runs this process's rank of a plan to its end."""
    try:
        while True:
            next(program).wait()
    except StopIteration as stop:
        return stop.value


def run_all_ranks(programs: list[Program[Result]], plan: Plan) -> list[Result]:
    """Runs the programs of all ranks, which share the queues of `LocalTransport`, in this process.

    Raises:
        PlanError: ranks wait for each other forever. The message says what each waits for.
    """
    results: list = [None] * len(programs)
    waiting: dict[int, _Exchange | None] = dict.fromkeys(range(len(programs)))
    while waiting:
        progress = False
        for rank, work in list(waiting.items()):
            try:
                while work is None or work.ready():
                    if work is not None:
                        work.wait()
                    progress = True
                    begun = next(programs[rank])
                    assert isinstance(begun, _Exchange)  # a `LocalTransport` makes no other
                    work = begun
                waiting[rank] = work
            except StopIteration as stop:
                results[rank] = stop.value
                del waiting[rank]
        if not progress:
            stuck = "; ".join(f"rank {rank} {work.missing()}" for rank, work in waiting.items() if work)
            raise PlanError(f"{plan.name}: ranks wait for each other forever: {stuck}")
    return results
