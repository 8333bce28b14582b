"""The contents of a plan's picture, as data: each rank's lanes of blocks and messages, and the rank of each pair."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.context_parallel.plan.ir import AllGather, Collective, Comm, Plan, Recv, Send, SwapHeads, T, Transfer
from megatron.context_parallel.plan.trace import Span, trace

BLOCKS = "blocks"  # the first lane; the others are channels
MESSAGE = 0.5  # the default time of a message; a pair of chunks takes 1
MEANING = {
    T.Q: "queries",
    T.KV: "keys, values",
    T.O: "partial output",
    T.QDO: "queries, output gradient",
    T.DO: "output gradient",
    T.DQ: "partial query gradient",
    T.DKV: "partial key, value gradient",
}


@dataclass(frozen=True)
class Bar:
    """One block, or one message of a rank, in one of its lanes.

    Attributes:
        tensor: the tensor that is sent; None for a block.
        texts: possible labels, longest first.
        pairs: the (query chunk, key/value chunk) pairs that a block computes.
        sent, received: the chunks that the rank sends and receives in it.
    """

    rank: int
    lane: int
    step: int
    start: float
    end: float
    tensor: T | None
    texts: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    sent: tuple[Transfer, ...] = ()
    received: tuple[Transfer, ...] = ()


class Idle(NamedTuple):
    """An interval in which a rank computes no block."""

    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class Picture:
    title: str
    ranks: int
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    finish: float
    transfer_time: float

    @property
    def tensors(self) -> list[T]:
        shown = {bar.tensor for bar in self.bars}
        return [t for t in T if t in shown]

    @property
    def idle(self) -> list[Idle]:
        """The intervals in which ranks compute no block."""
        gaps = []
        for rank in range(self.ranks):
            now = 0.0
            for start, end in sorted((bar.start, bar.end) for bar in self.bars if bar.rank == rank and not bar.lane):
                if start > now:
                    gaps.append(Idle(rank, now, start))
                now = end
            if now < self.finish:
                gaps.append(Idle(rank, now, self.finish))
        return gaps

    @property
    def digest(self) -> str:
        """Equal for equal pictures, independent of fonts."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def picture(plan: Plan, transfer_time: float = MESSAGE) -> Picture:
    """The lanes of a plan. A pair of chunks takes one unit of time and a message `transfer_time` units.

    The messages that a rank sends in one batch are drawn one after the other and fill the batch's time. A received
    message is drawn with its sender, unless the rank sends nothing in that batch.
    """
    # With rounds of tokens all messages are those of swaps, and have the tokens of a round.
    run = trace(plan, transfer_time=lambda transfer: transfer_time * transfer.share / plan.token_rounds)
    spans = _one_after_another(s for s in run.spans if s.end > s.start)
    used = {span.channel for span in spans} - {""}
    channels = [c for c in dict.fromkeys((*plan.channels, *sorted(used))) if c in used]
    lanes = (BLOCKS, *channels)
    bars = tuple(bar for span in spans for bar in _bars(plan, span, lanes))
    ranks = f"{plan.n} ranks"
    if plan.head_parallel_size > 1:
        ranks = f"{plan.n} of {plan.all_ranks} ranks, for 1/{plan.head_parallel_size} of the heads"
        ranks += f" in {plan.head_rounds} rounds" if plan.head_rounds > 1 else ""
        ranks += f" in {plan.token_rounds} rounds of tokens" if plan.token_rounds > 1 else ""
    title = f"{plan.name}, {ranks}, {plan.layout} layout, {'backward' if plan.backward else 'forward'}"
    return Picture(title, plan.n, lanes, bars, round(run.finish, 6), transfer_time)


def _one_after_another(spans: Iterable[Span]) -> list[Span]:
    """Spans by rank and start. Swaps that share a lane in both directions are drawn in turn, in the same time."""
    shown = []
    until: dict[tuple[int, str], float] = {}
    for span in sorted(spans, key=lambda s: (s.rank, s.start, s.channel, s.end)):
        lane = span.rank, span.channel
        start = until.get(lane, 0.0) if isinstance(span.what[0], SwapHeads) else span.start
        shown.append(span._replace(start=max(span.start, min(start, span.end))))
        until[lane] = span.end
    return shown


def _bars(plan: Plan, span: Span, lanes: tuple[str, ...]) -> Iterator[Bar]:
    start, end = round(span.start, 6), round(span.end, 6)
    if not span.channel:
        pairs = tuple(span.what[0].pairs(plan.visible_pairs))
        texts = ("{},{}".format(*pairs[0]),) if len(pairs) == 1 else (f"{len(pairs)} pairs", f"{len(pairs)}")
        yield Bar(span.rank, 0, span.step, start, end, None, texts, pairs)
        return
    shown = [op for op in span.what if not isinstance(op, Recv)] or span.what
    messages = [message for op in shown for message in _messages(plan, op, span.rank)]
    count = len(messages)
    ends = [round(start + i * (end - start) / count, 6) for i in range(count + 1)]
    for (tensor, texts, sent, received), start, end in zip(messages, ends, ends[1:], strict=False):
        lane = lanes.index(span.channel)
        yield Bar(span.rank, lane, span.step, start, end, tensor, texts, sent=sent, received=received)


def _messages(plan: Plan, op: Comm | SwapHeads, rank: int) -> Iterator[tuple]:
    """(tensor, texts, sent, received) of each tensor that an operation sends."""
    texts: dict[T, tuple[str, ...]]
    if isinstance(op, SwapHeads):
        rank = plan.grid.rank(context=rank)
        transfers = plan.swap_transfers(op, rank)
        texts = {t: (f"swap {t}", f"{t}") for t in op.tensors}
    elif isinstance(op, Collective):
        word = "gather" if isinstance(op, AllGather) else "reduce"
        transfers = op.transfers(rank)
        texts = {op.tensor: (f"{word} {op.tensor}", f"{op.tensor}")}
    else:
        way = f"{op.chunk}{'→' if isinstance(op, Send) else '←'}{op.peer}"
        transfers = op.transfers(rank)
        texts = {op.tensor: (f"{op.tensor}{way}", way, f"{op.chunk}")}
    for tensor, written in texts.items():
        sent = tuple(t for t in transfers if t.tensor is tensor and t.sender == rank)
        received = tuple(t for t in transfers if t.tensor is tensor and t.receiver == rank)
        yield tensor, written, sent, received
