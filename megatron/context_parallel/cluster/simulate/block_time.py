"""The time of a plan's blocks on a device."""

import math
from collections.abc import Hashable
from functools import cache, cached_property
from typing import NamedTuple

import numpy

from megatron.context_parallel.cluster.description import BACKWARD, AttentionRate, Device
from megatron.context_parallel.kernels.masks import CAUSAL
from megatron.context_parallel.plan.ir import Attend, Plan
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.shift import Shift

from .seen_shares import THOUSANDTHS, seen_shares

MANY_RANKS = 64  # more are simulated by few that stand for all, if some can


class PieceShare(NamedTuple):
    """A piece of a block, as shares of the rows of a chunk and of the pairs of rows of two chunks."""

    causal: bool
    queries: float
    keys: float
    pairs: float

    @property
    def look(self) -> tuple[float, ...]:
        return tuple([round(number, 9) for number in self])


class CallTime:
    """Seconds of a call of the attention kernel on a device, for a dtype such as "bf16"."""

    def __init__(self, device: Device, dtype: str, head_dim: int) -> None:
        self.launch = device.block_us * 1e-6
        self.rates = {causal: _nearest(device.attention, dtype, head_dim, causal) for causal in (False, True)}

    def __call__(self, causal: bool, queries: float, keys: float, operations: float, backward: bool) -> float:
        """`operations`: of all heads, in this direction, for the pairs of rows that are seen."""
        return self.launch + operations / _between(self.rates[causal], queries, keys, backward)


class BlockTime:
    """Seconds of the blocks of one pass.

    A block is cut into pieces, as before a kernel computes it. A piece takes `block_us`, its operations at the rate
    measured for its size and mask, and the adding of its result to partials.

    Args:
        device: computes them.
        plan: the pass.
        shape: the sizes on a rank.
        mask, length: the mask and tokens of the sequence.
        dtype: of the model, such as "bf16".
    """

    def __init__(self, device: Device, plan: Plan, shape: Shape, mask: Mask, length: int, dtype: str) -> None:
        self.device = device
        self.backward = plan.backward
        self.call = CallTime(device, dtype, shape.head_dim)
        self.mask = mask
        self.length = length
        self.shares = seen_shares(plan.layout, plan.n, mask, length)
        self.rows = length / plan.n
        self.many = plan.all_ranks > MANY_RANKS
        heads = shape.heads / plan.head_parts * (shape.rows * plan.all_ranks / length)  # times batch
        self.operations = 2 * heads * (shape.head_dim + (shape.value_dim or shape.head_dim))  # a seen pair of rows
        self.query_numbers = heads * self.rows * shape.head_dim
        self.key_numbers = 2 * self.query_numbers * max(shape.kv_heads, plan.head_parts) / shape.heads
        self.itemsize = shape.itemsize
        self.seconds, self.pieces, self._computed = cache(self._seconds), cache(self._pieces), cache(self._call)
        self._parts: dict[tuple, tuple[PieceShare, ...]] = {}
        self._look = cache(lambda parts: tuple([part.look for part in parts]))

    def __call__(self, attend: Attend) -> float:
        """Seconds of a block."""
        if len(attend.q_chunks) == len(attend.kv_chunks) == 1:
            return self._seconds_of_kind[self.shares.kinds.of_pair.item(attend.q_chunks[0], attend.kv_chunks[0])]
        return self.seconds(attend.q_chunks, tuple(sorted(attend.kv_chunks)))

    def of_range(self, number: int, rounds: int) -> float:
        """Seconds of the block of a round of tokens: its queries with the keys of earlier ranges, and with its own."""
        rows = self.rows / rounds
        operations = self.operations * rows**2 * (BACKWARD if self.backward else 1)
        seconds = self.call(True, rows, rows, operations / 2, self.backward)
        if number:
            seconds += self.call(False, rows, number * rows, operations * number, self.backward)
        added = self.query_numbers + (number + 1) * self.key_numbers * self.backward
        return seconds + 12 * added / rounds / (self.device.memory_GB_s * 1e9)

    def look(self, attend: Attend) -> Hashable:
        """What the time of a block depends on, on any device. What would differ by less than 1e-9 is the same."""
        return self.pieces(attend.q_chunks, tuple(sorted(attend.kv_chunks)))

    def _pieces(self, q_chunks: tuple[int, ...], kv_chunks: tuple[int, ...]) -> Hashable:
        return len(kv_chunks), tuple([self._look(self.parts(q, kv_chunks)) for q in q_chunks])

    def _seconds(self, q_chunks: tuple[int, ...], kv_chunks: tuple[int, ...]) -> float:
        parts = [part for q in q_chunks for part in self.parts(q, kv_chunks)]
        if not parts:
            return 0.0
        moved = sum(self._added(part) for part in parts)
        if len(kv_chunks) > 1:  # keys are gathered, and their gradients scattered
            moved += len(kv_chunks) * self.key_numbers * (2 * self.itemsize + 16 * self.backward)
        return sum(map(self._computed, parts)) + moved / (self.device.memory_GB_s * 1e9)

    def repeats(self, shift: Shift) -> bool:
        """Whether the block of any two chunks looks as that of the chunks that are the period further."""
        looks = self._looks
        further = numpy.array([shift.moved(chunk, shift.period) for chunk in range(shift.n)])
        return all(numpy.array_equal(looks[further[q], further], looks[q]) for q in range(shift.n))

    @cached_property
    def _seconds_of_kind(self) -> list[float]:
        return [self._seconds((q,), (kv,)) for q, kv in self.shares.kinds.examples]

    @cached_property
    def _looks(self) -> numpy.ndarray:
        """The look of the block of each two chunks, as a number, [query chunk, key chunk]."""
        numbers: dict[Hashable, int] = {}
        looks = [self._pieces((q,), (kv,)) for q, kv in self.shares.kinds.examples]
        of_kind = [numbers.setdefault(look, len(numbers)) for look in looks]
        return numpy.array(of_kind, numpy.int32)[self.shares.kinds.of_pair]

    def _call(self, part: PieceShare) -> float:
        """Seconds of a call of the kernel."""
        operations = self.operations * part.pairs * self.rows**2 * (BACKWARD if self.backward else 1)
        rows, keys = self.rows * part.queries, self.rows * part.keys
        return self.call(part.causal, rows, keys, operations, self.backward)

    def _added(self, part: PieceShare) -> float:
        """Bytes: a result is added to the partial, two reads and a write of float32."""
        return 12 * (part.queries * self.query_numbers + part.keys * self.key_numbers * self.backward)

    def parts(self, q: int, kv_chunks: tuple[int, ...]) -> tuple[PieceShare, ...]:
        """The pieces of a query chunk against gathered key chunks, in ascending order."""
        seen = self.shares.seen(q)
        looks = seen.reshape(len(seen), -1)[:, self.shares.order(kv_chunks)]
        key = looks.shape, looks.tobytes()
        if key not in self._parts:
            share = looks.sum(dtype=numpy.int64).item() / THOUSANDTHS
            self._parts[key] = self._cut(q, kv_chunks, share) if share else ()
        return self._parts[key]

    def _cut(self, q: int, kv_chunks: tuple[int, ...], share: float) -> tuple[PieceShare, ...]:
        """The pieces of a small sequence; full ones count as one. Together they have the share of pairs that is seen.

        So ranks whose blocks differ only in where they are cut take the same time. Of many ranks, a causal square among
        gathered keys has the queries of one progression: two that are neighbours count as if keys lay between them.
        """
        small = self.shares.small
        rows = small.q.rows[q]
        full = 0.0
        squares = list[float]()
        for piece in small.pieces(q, kv_chunks):
            sizes = (piece.q, rows), (piece.kv, rows * len(kv_chunks))
            queries, keys = (len(range(*part.indices(size))) / rows for part, size in sizes)
            if piece.mask == CAUSAL:
                squares.append(round(16 * queries) / 16)  # a diagonal may be a row shorter
            else:
                full += queries * keys
        side = min(1.0, math.sqrt(full))
        if len(kv_chunks) > 1:  # gathered keys are many, for the queries of a progression
            side = 1 / len(self.shares.chunks.progressions[q])
        if len(kv_chunks) > 1 and self.many:
            full += sum([square * (square - side) / 2 for square in squares if square > side])
            squares = [piece for square in squares for piece in max(1, round(square / side)) * [min(square, side)]]
        parts = [PieceShare(False, side, full / side, full)] if full else []
        parts += [PieceShare(True, square, square, square**2 / 2) for square in squares]
        total = sum(part.pairs for part in parts)
        return tuple([part._replace(pairs=part.pairs * share / total) for part in parts])


def rate_at(device: Device, dtype: str, head_dim: int, causal: bool, rows: float, backward: bool) -> float:
    """Operations a second of a call of the kernel with as many queries and keys, between the sizes measured."""
    return _between(_nearest(device.attention, dtype, head_dim, causal), rows, rows, backward)


def _between(rates: list[AttentionRate], queries: float, keys: float, backward: bool) -> float:
    """Between the square blocks measured and, with more keys than queries, those measured with more keys."""
    side = math.sqrt(queries * keys)
    long = [rate for rate in rates if rate.keys]
    square = _of_side([rate for rate in rates if not rate.keys], side, backward)
    if not long or keys <= queries:
        return square
    part = min(1.0, math.log(keys / queries) / math.log(long[0].side ** 2 / long[0].rows ** 2))
    return square + part * (_of_side(long, side, backward) - square)


def _of_side(rates: list[AttentionRate], side: float, backward: bool) -> float:
    known = [rate.backward_TFLOP_s if backward else rate.forward_TFLOP_s for rate in rates]
    return 1e12 * float(numpy.interp(math.log(side), [math.log(rate.side) for rate in rates], known))


def _nearest(rates: tuple[AttentionRate, ...], dtype: str, head_dim: int, causal: bool) -> list[AttentionRate]:
    """The rates of the dtype, head_dim and mask measured that are nearest to those asked for, by rows."""

    def distance(rate: AttentionRate) -> tuple:
        return rate.dtype != dtype, abs(rate.head_dim - head_dim), (rate.mask == "causal") != causal

    best = min(map(distance, rates))
    like = [rate for rate in rates if distance(rate) == best]
    return sorted(like, key=lambda rate: rate.side)
