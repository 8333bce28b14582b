"""The language of plans: which rank computes which (query chunk, key/value chunk) pair, and what travels when.

A plan is plain data. Strategies write it; the executor, the verifier, the timeline and the drawings read it.

Each rank starts with the tensors it owns and runs its steps in order. At the start of a step its communication is
launched asynchronously (after anything it sends has arrived and been reduced); then its blocks are computed while
the communication flies. A received chunk is waited for where it is first used. Operations on one channel of one
rank complete in the order of their steps; operations on different channels overlap.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class T(StrEnum):
    """A tensor that travels, by chunk. The comment gives its content for a chunk of s tokens."""

    Q = "Q"  # queries [s, b, heads, d]
    KV = "KV"  # keys and values [2, s, b, kv_heads, d]
    O = "O"  # partial output, float32 [s, b, heads, d], and its log-sum-exp [s, b, heads]
    QDO = "QDO"  # queries, output gradient [s, b, heads, d]; log-sum-exp, delta = rowsum(dO * O) [s, b, heads]
    DQ = "DQ"  # partial query gradient, float32 [s, b, heads, d]
    DKV = "DKV"  # partial key and value gradients, float32 [2, s, b, kv_heads, d]


PARTIAL = frozenset({T.O, T.DQ, T.DKV})  # built up by Attend, merged when received, moved (not copied) when sent


@dataclass(frozen=True, slots=True)
class Send:
    """Send a chunk to `peer`. A partial leaves this rank with it."""

    tensor: T
    chunk: int
    peer: int
    channel: str = "ring"


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive a chunk from `peer`; with `reduce`, merge it into the local partial of that chunk."""

    tensor: T
    chunk: int
    peer: int
    reduce: bool = False
    channel: str = "ring"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Every rank of `group` contributes chunk `chunks[i]` (i its place in the group) and gets all of them."""

    tensor: T
    group: tuple[int, ...]
    chunks: tuple[int, ...]
    channel: str = "gather"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Every rank of `group` contributes partials of all `chunks`; rank i of the group ends with chunk `chunks[i]`."""

    tensor: T
    group: tuple[int, ...]
    chunks: tuple[int, ...]
    channel: str = "gather"


Comm = Send | Recv | AllGather | ReduceScatter


@dataclass(frozen=True, slots=True)
class Attend:
    """One block: these query chunks against these key/value chunks, merged into the local partials."""

    q_chunks: tuple[int, ...]
    kv_chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    comm: tuple[Comm, ...] = ()
    attend: tuple[Attend, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One pass (forward or backward) of one distributed attention on `n` ranks.

    Chunk i belongs to rank i: it starts there (`starts`) and its result must end there (`ends`).
    """

    name: str
    layout: str
    causal: bool
    backward: bool
    steps: tuple[tuple[Step, ...], ...] = field(repr=False)  # steps[rank]

    @property
    def n(self) -> int:
        return len(self.steps)

    @property
    def starts(self) -> tuple[T, T]:
        return (T.QDO, T.KV) if self.backward else (T.Q, T.KV)

    @property
    def ends(self) -> tuple[T, ...]:
        return (T.DQ, T.DKV) if self.backward else (T.O,)


class PlanError(ValueError):
    """A plan that would compute a wrong result or hang; the message names rank, step and chunk."""
