"""The volume that each rank of a plan receives: in the units of the papers' formulas, and in bytes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .ir import OF_KEYS, PARTIAL, Plan, T, Transfer

if TYPE_CHECKING:  # commands read the volume before they import torch
    from .row_sets import RowSets


def units(tensor: T, kv_ratio: float = 1.0) -> float:
    """Units of one chunk of `tensor`, without log-sum-exp and delta. `kv_ratio`: key/value heads per query head."""
    return {T.Q: 1, T.KV: 2 * kv_ratio, T.O: 1, T.QDO: 2, T.DO: 1, T.DQ: 1, T.DKV: 2 * kv_ratio}[tensor]


def received(plan: Plan, rank: int, kv_ratio: float = 1.0) -> Counter:
    """Units that `rank` (of all ranks) receives, by tensor."""
    volume: Counter = Counter()
    for transfer, _ in _incoming(plan, rank):
        moved = units(transfer.tensor, kv_ratio) * transfer.share
        volume[transfer.tensor] += moved  # type: ignore[assignment]  # units may be fractions
    return volume


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention on one rank. With tensor parallelism, heads are those of the rank.

    Attributes:
        rows: tokens of a rank times batch size.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: of queries and keys.
        itemsize: bytes of a number in the model's dtype. Log-sum-exp and delta are float32.
        value_dim: head_dim of values; default: that of keys.
        partial_itemsize: bytes of a number of a partial. In this project it is float32, unless the plan sends partials
            in the model's dtype.
        key_rows: keys of a rank times batch size, including cached ones; default: as many as queries.
    """

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    value_dim: int | None = None
    partial_itemsize: int = 4
    key_rows: int | None = None


RowCounts = tuple[Sequence[int], Sequence[int]]  # rows of queries and of keys of each chunk, times batch size


def received_bytes(plan: Plan, rank: int, shape: Shape, rows: "RowCounts | RowSets | None" = None) -> int:
    """Bytes that `rank` (of all ranks) receives in all rounds, with log-sum-exp and delta, without headers.

    With `rows`, chunks have these sizes instead of `shape.rows`, or only the rows of these sets are sent.
    """
    total = 0.0
    for t, swap in _incoming(plan, rank):
        share = t.share
        sizes = shape
        if isinstance(rows, tuple):
            sizes = replace(shape, rows=rows[t.tensor in OF_KEYS][t.chunk])
        elif rows is not None and not swap:
            share *= rows.share(t)
        total += chunk_bytes(plan, t.tensor, sizes, swap) * share
    return round(plan.rounds * total)


def _incoming(plan: Plan, rank: int) -> Iterator[tuple[Transfer, bool]]:
    """The transfers that a rank receives in a round, and whether each is in a head swap."""
    context_rank = plan.grid.coordinates(rank)["context"]
    for swap in plan.swaps:
        yield from ((t, True) for t in plan.swap_transfers(swap, rank) if t.receiver == rank)
    for op in (op for step in plan.steps[context_rank] for op in step.comm):
        yield from ((t, False) for t in op.transfers(context_rank) if t.receiver == context_rank)


def chunk_bytes(plan: Plan, tensor: T, shape: Shape, swap: bool, sent: bool = True) -> int:
    """Bytes of one chunk, for the heads of one round: of its message if `sent`, else in the memory of a rank.

    In a swap, also for the tokens of one round. Swapped tensors have the model's dtype, except gradients of replicated
    key/value heads.
    """
    value_dim = shape.head_dim if shape.value_dim is None else shape.value_dim
    statistic = 4 * shape.rows * shape.heads  # log-sum-exp or delta
    query, out = shape.rows * shape.heads * shape.head_dim, shape.rows * shape.heads * value_dim
    keys = (shape.key_rows or shape.rows) * max(shape.kv_heads, plan.head_parts) * (shape.head_dim + value_dim)
    whole = tensor not in PARTIAL or (swap and not (tensor is T.DKV and plan.head_parts > shape.kv_heads))
    numbers, statistics = {
        T.Q: (query, 0),
        T.KV: (keys, 0),
        T.O: (out, 1),
        T.QDO: (query + out, 2),
        T.DO: (out, 1),
        T.DQ: (query, 0),
        T.DKV: (keys, 0),
    }[tensor]
    narrow = whole or (sent and not swap and plan.partials_in_16_bits)
    size = numbers * (shape.itemsize if narrow else shape.partial_itemsize) + statistics * statistic
    return size // (plan.rounds if swap else plan.head_rounds)
