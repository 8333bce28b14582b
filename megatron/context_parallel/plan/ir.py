"""The plan language: which rank computes which (query chunk, key/value chunk) pair, and which chunk is sent when.

A plan is plain data. Strategies write it. The executor, the verifier, the trace and the drawings read it.

Each rank starts with the tensors that it owns and runs its steps in order. A step first waits until all data that it
sends has arrived and is merged. Then it launches its communication, and computes its blocks meanwhile. The rank waits
for a received chunk where it first uses it. The batches of one channel (`batches`) complete in order, and at most
`IN_FLIGHT` of them are in flight at once. Different channels overlap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import parts
from megatron.context_parallel.tokens.rank_grid import RankGrid


class T(StrEnum):
    """A tensor that is sent in chunks. A chunk of s tokens has these contents.

    Attributes:
        Q: queries [s, b, heads, d].
        KV: keys and values [s, b, kv_heads, d].
        O: partial output, float32 [s, b, heads, d], and its log-sum-exp [s, b, heads].
        QDO: queries, output gradient [s, b, heads, d]; log-sum-exp, delta = rowsum(dO * O) [s, b, heads].
        DO: output gradient [s, b, heads, d] and delta [s, b, heads]; sent only in head swaps.
        DQ: partial query gradient, float32 [s, b, heads, d].
        DKV: partial key and value gradients, float32 [s, b, kv_heads, d] each.
    """

    Q = "Q"
    KV = "KV"
    O = "O"
    QDO = "QDO"
    DO = "DO"
    DQ = "DQ"
    DKV = "DKV"


HEAD_FIRST, CONTEXT_FIRST = RANK_PLACEMENTS = "head-first", "context-first"  # of ranks
OF_KEYS = (T.KV, T.DKV)
PARTIAL = frozenset({T.O, T.DQ, T.DKV})  # accumulated by Attend, merged when received, moved (not copied) when sent
SWAPS = "heads"  # the channel of head swaps
IN_FLIGHT = 2  # batches of one channel in flight before a rank waits for the oldest; limits memory


Key = tuple[T, int]  # a tensor and a chunk


class Transfer(NamedTuple):
    """A transfer from one rank to another: a chunk of a tensor, or a `share` of it."""

    tensor: T
    chunk: int
    sender: int
    receiver: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send a chunk to `peer`. After it has sent a partial, this rank no longer has it."""

    tensor: T
    chunk: int
    peer: int
    channel: str = "ring"

    def reads(self, rank: int) -> tuple[Key, ...]:
        """The chunks that `rank` must have before it launches this operation."""
        return ((self.tensor, self.chunk),)

    def brings(self, rank: int) -> tuple[Key, ...]:
        """The chunks that `rank` has when this operation is complete."""
        return ()

    def transfers(self, rank: int) -> tuple[Transfer, ...]:
        """The transfers of `rank`, sent and received."""
        return (Transfer(self.tensor, self.chunk, rank, self.peer),)


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive a chunk from `peer`. A partial is merged into the local partial of that chunk."""

    tensor: T
    chunk: int
    peer: int
    channel: str = "ring"

    def reads(self, rank: int) -> tuple[Key, ...]:
        return ()

    def brings(self, rank: int) -> tuple[Key, ...]:
        return ((self.tensor, self.chunk),)

    def transfers(self, rank: int) -> tuple[Transfer, ...]:
        return (Transfer(self.tensor, self.chunk, self.peer, rank),)


@dataclass(frozen=True, slots=True)
class AllGather:
    """Each rank of `group` gives one chunk and gets all of them. Rank i of the group gives `chunks[i]`."""

    tensor: T
    group: tuple[int, ...]
    chunks: tuple[int, ...]
    channel: str = "gather"

    def reads(self, rank: int) -> tuple[Key, ...]:
        return ((self.tensor, self.chunks[self.group.index(rank)]),)

    def brings(self, rank: int) -> tuple[Key, ...]:
        return tuple((self.tensor, c) for r, c in zip(self.group, self.chunks, strict=True) if r != rank)

    def transfers(self, rank: int) -> tuple[Transfer, ...]:
        own = self.chunks[self.group.index(rank)]
        others = [(r, c) for r, c in zip(self.group, self.chunks, strict=True) if r != rank]
        return (
            *(Transfer(self.tensor, own, rank, r) for r, _ in others),
            *(Transfer(self.tensor, c, r, rank) for r, c in others),
        )


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Each rank of `group` gives partials of all `chunks`. Rank i of the group gets the sum of `chunks[i]`."""

    tensor: T
    group: tuple[int, ...]
    chunks: tuple[int, ...]
    channel: str = "gather"

    def reads(self, rank: int) -> tuple[Key, ...]:
        return tuple((self.tensor, c) for c in self.chunks)

    def brings(self, rank: int) -> tuple[Key, ...]:
        return ((self.tensor, self.chunks[self.group.index(rank)]),)

    def transfers(self, rank: int) -> tuple[Transfer, ...]:
        own = self.chunks[self.group.index(rank)]
        others = [(r, c) for r, c in zip(self.group, self.chunks, strict=True) if r != rank]
        return (
            *(Transfer(self.tensor, c, rank, r) for r, c in others),
            *(Transfer(self.tensor, own, r, rank) for r, _ in others),
        )


@dataclass(frozen=True, slots=True)
class SwapHeads:
    """Each rank of a head group swaps its chunk of all heads for the group's chunks of a part of the heads, or back.

    It is not part of a step. Each round of a head-parallel attention begins and ends with one.

    Attributes:
        tensors: what is swapped.
        size: the number of ranks of a head group.
    """

    tensors: tuple[T, ...]
    size: int
    channel: str = SWAPS


Message = Send | Recv
Collective = AllGather | ReduceScatter
Comm = Message | Collective


def batches(comm: tuple[Comm, ...]) -> list[tuple[str, list[Comm]]]:
    """The batches of a step in the order of launch, each as (channel, operations).

    First comes each collective, as a batch of its own. Then the messages of each channel form one batch.
    """
    alone: list[tuple[str, list[Comm]]] = []
    messages: dict[str, list[Comm]] = {}
    for op in comm:
        of_channel = messages.setdefault(op.channel, [])
        if isinstance(op, Message):
            of_channel.append(op)
        else:
            alone.append((op.channel, [op]))
    return alone + [(channel, ops) for channel, ops in messages.items() if ops]


@dataclass(frozen=True, slots=True)
class Attend:
    """One block: query chunks against key/value chunks. Its results are merged into the local partials.

    Attributes:
        q_chunks, kv_chunks: the chunks. All pairs of them that the mask leaves are computed.
        heads: the part of the heads that it computes, from one share of them to another, rounded to whole key/value
            heads. The parts of a block follow each other, from 0 to 1, and its partials are not sent between them.
    """

    q_chunks: tuple[int, ...]
    kv_chunks: tuple[int, ...]
    heads: tuple[float, float] = (0.0, 1.0)

    @property
    def share(self) -> float:
        """The share of the heads that it computes."""
        return self.heads[1] - self.heads[0]

    def reads(self, backward: bool) -> tuple[Key, ...]:
        """The chunks that it needs."""
        query = T.QDO if backward else T.Q
        return (*[(query, c) for c in self.q_chunks], *[(T.KV, c) for c in self.kv_chunks])

    def pairs(self, visible_pairs: Pairs) -> Iterator[tuple[int, int]]:
        """The (query chunk, key/value chunk) pairs that the mask does not empty."""
        for q in self.q_chunks:
            row = visible_pairs.rows[q]
            for kv in self.kv_chunks:
                if row >> kv & 1:
                    yield q, kv


@dataclass(frozen=True, slots=True)
class Step:
    """Some communication, and blocks that are computed while it runs.

    Attributes:
        comm: the operations. All of them are launched before the first block is computed.
        attend: the blocks, in the order in which they are computed.
    """

    comm: tuple[Comm, ...] = ()
    attend: tuple[Attend, ...] = ()


class Steps(Sequence):
    """The steps of all ranks. The steps of a rank are written when they are first accessed."""

    def __init__(self, n: int, write: Callable[[int], tuple[Step, ...]]) -> None:
        self.write, self._written = write, list[tuple[Step, ...] | None]([None] * n)

    def __len__(self) -> int:
        return len(self._written)

    def __getitem__(self, rank: int | slice) -> tuple:
        if isinstance(rank, slice):
            return tuple(self[r] for r in range(len(self))[rank])
        rank = range(len(self))[rank]
        steps = self._written[rank]
        if steps is None:
            steps = self._written[rank] = self.write(rank)
        return steps


@dataclass(frozen=True, eq=False)  # compared by identity, so that readers can cache results by plan
class Plan:
    """One pass (forward or backward) of one distributed attention on `n` ranks.

    Chunk i belongs to rank i. Its tensors start there (`inputs`) and its results must end there (`results`).

    With `head_parallel_size` > 1 the `all_ranks` are so many groups of n ranks. Each group runs the steps for its part
    of the heads. Before and after the steps, the ranks with the same rank in their groups swap heads. Chunk i is then a
    union of `head_parallel_size` smaller chunks, and each of these ranks owns one of them. By the `placement` these
    ranks are neighbours (`HEAD_FIRST`), or those that run the steps together are (`CONTEXT_FIRST`).

    With `head_rounds` > 1 a rank runs the steps that often, each time for a part of its heads. The swap before a round
    travels during the round before it, and the swap after a round during the next one.

    With `token_rounds` > 1 a rank does the same for parts of the tokens instead, in the order of their positions, and
    backward from the last. In a round, the new queries see all keys that are there, or get their gradients from them.
    This needs one rank that runs the steps, and a mask that hides later tokens.

    With `partials_in_16_bits` a partial output or gradient that the steps send is rounded to the model's dtype. Its
    log-sum-exp stays wide, and partials are merged and kept in float32.

    With a `period`, the strategy says that rank r + `period` of the steps does what rank r does, with all ranks and
    chunks further, if the chunks that the mask shows repeat after it too. With a `width`, further is as in `Shift`.
    `verify` checks this.
    """

    name: str
    layout: str
    visible_pairs: Pairs
    backward: bool
    steps: Sequence[tuple[Step, ...]] = field(repr=False)  # steps[rank]
    channels: tuple[str, ...] = ("ring",)  # of messages and reduce-scatters
    head_parallel_size: int = 1
    placement: str = HEAD_FIRST
    head_rounds: int = 1
    partials_in_16_bits: bool = False
    period: int | None = None
    width: int = 1
    token_rounds: int = 1

    @property
    def n(self) -> int:
        """The number of ranks that run the steps together."""
        return len(self.steps)

    @property
    def all_ranks(self) -> int:
        """The number of all ranks, including those of other heads."""
        return self.n * self.head_parallel_size

    @cached_property
    def grid(self) -> RankGrid:
        """All ranks as a grid: their part of the heads (`heads`), and their rank in the steps (`context`)."""
        if self.placement == HEAD_FIRST:
            return RankGrid(("heads", "context"), (self.head_parallel_size, self.n))
        return RankGrid(("context", "heads"), (self.n, self.head_parallel_size))

    def chunk_of(self, rank: int) -> int:
        """The chunk of a rank (of all ranks). The placement moves data, so that a swap stays in its head group."""
        coordinates = self.grid.coordinates(rank)
        small_chunks = parts(self.layout, coordinates["context"], self.n, self.head_parallel_size)
        return small_chunks[coordinates["heads"]]

    @property
    def head_parts(self) -> int:
        """The parts of the heads. A rank computes `head_rounds` of them, one after the other."""
        return self.head_parallel_size * self.head_rounds

    @property
    def rounds(self) -> int:
        """How often a rank swaps and runs the steps. Rounds are of heads or of tokens, not both."""
        return self.head_rounds * self.token_rounds

    def head_round(self, round_index: int) -> int:
        """The part of its heads that a rank computes in a round."""
        return round_index if self.token_rounds == 1 else 0

    def range_of(self, round_index: int) -> int:
        """The part of the tokens, in the order of positions, of a round of tokens."""
        return self.token_rounds - 1 - round_index if self.backward else round_index

    def block_share(self, round_index: int) -> float:
        """The share of a block's pairs of tokens that are computed in a round, with a causal mask."""
        return (2 * self.range_of(round_index) + 1) / self.token_rounds**2 if self.token_rounds > 1 else 1.0

    def kv_ratio(self, heads: int, kv_heads: int) -> float:
        """Key/value heads that are sent per query head. With fewer heads than parts, this includes replicas.

        `Pass.kv_ratio` is that of the model, without replicas.
        """
        return max(kv_heads, self.head_parts) / heads

    @property
    def keeps_swapped(self) -> bool:
        """Whether the backward pass gets swapped queries, keys and values from the forward pass.

        With several rounds it gets its own ones and swaps them again.
        """
        return self.head_parallel_size > 1 and self.head_rounds == 1

    @cached_property
    def rounds_overlap(self) -> bool:
        """Whether a rank waits for the last messages of a round, and swaps, after the first block of the next round.

        The swaps then do not share links with the first messages of a round, and blocks hide the last ones. This needs
        a round with more than one step of blocks. All ranks do as rank 0, because they swap in one order.
        """
        return self.head_rounds > 1 and sum(bool(step.attend) for step in self.steps[0]) > 1

    @property
    def swaps_before(self) -> tuple[SwapHeads, ...]:
        """The swap before the steps of a round."""
        tensors = (T.DO,) if self.backward and self.keeps_swapped else self.inputs
        return (SwapHeads(tensors, self.head_parallel_size),) if self.head_parallel_size > 1 else ()

    @property
    def swaps_after(self) -> tuple[SwapHeads, ...]:
        """The swap after the steps of a round."""
        return (SwapHeads(self.results, self.head_parallel_size),) if self.head_parallel_size > 1 else ()

    @property
    def swaps(self) -> tuple[SwapHeads, ...]:
        """Both swaps of a round."""
        return self.swaps_before + self.swaps_after

    def swap_transfers(self, op: SwapHeads, rank: int) -> tuple[Transfer, ...]:
        """The transfers of `rank` (of all ranks) in a head swap, as shares of chunks of the steps."""
        chunk = self.grid.coordinates(rank)["context"]
        peers = [peer for peer in self.grid.along(rank, "heads") if peer != rank]
        pairs = [(rank, peer) for peer in peers] + [(peer, rank) for peer in peers]
        return tuple(Transfer(t, chunk, *pair, 1 / op.size) for pair in pairs for t in op.tensors)

    def communicators(self, rank: int) -> list[tuple[str, tuple[int, ...]]]:
        """The communicators of `rank` (of all ranks), each as (channel, ranks), sorted."""
        context_rank, in_steps = self.grid.coordinates(rank)["context"], self.grid.along(rank, "context")
        everyone = tuple(range(self.all_ranks))
        needed = {(channel, everyone) for channel in self.channels}
        needed.update((op.channel, everyone) for op in self.swaps_before)
        for step in self.steps[context_rank]:
            for op in step.comm:
                if isinstance(op, Collective):
                    needed.add((op.channel, tuple(in_steps[r] for r in op.group)))
        return sorted(needed)

    def messages(self, rank: int) -> set[tuple[str, int, int]]:
        """Who sends messages to whom in the steps of `rank` (of all ranks): (channel, sender, receiver).

        These are sends, receives, and reduce-scatters that no library can sum.
        """
        context_rank, in_steps = self.grid.coordinates(rank)["context"], self.grid.along(rank, "context")
        found = set[tuple[str, int, int]]()
        for op in (op for step in self.steps[context_rank] for op in step.comm):
            if isinstance(op, Message) or (isinstance(op, ReduceScatter) and not self.can_reduce(op)):
                found.update((op.channel, in_steps[t.sender], in_steps[t.receiver]) for t in op.transfers(context_rank))
        return found

    def can_reduce(self, op: ReduceScatter) -> bool:
        """Whether a library may sum the partials.

        Outputs are not merely summed. Sums in 16 bits would be rounded on each rank; a message is rounded once.
        """
        return op.tensor is not T.O and not self.partials_in_16_bits

    @property
    def inputs(self) -> tuple[T, T]:
        """The tensors of its own chunk that a rank has before the steps."""
        return (T.QDO, T.KV) if self.backward else (T.Q, T.KV)

    @property
    def results(self) -> tuple[T, ...]:
        """The results of its own chunk that a rank has after the steps."""
        return (T.DQ, T.DKV) if self.backward else (T.O,)


class PlanError(ValueError):
    """A plan that would compute a wrong result or hang. The message names rank, step and chunk."""
