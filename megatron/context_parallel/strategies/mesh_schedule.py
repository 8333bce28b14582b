"""The schedule of communication and blocks in a tile of Mesh-Attention (Chen et al. 2025, sections 3.5 and 3.6).

A tile has `a` query chunks (rows) and `b` key/value chunks (columns), numbered as in Table 1 of the paper. Row u is the
query chunk of the u-th receive in the query group. Column v is the key/value chunk of the v-th receive in the key/value
group. Row 0 and column 0 are the rank's own. All ranks follow the same schedule.

The cost of a tensor (c_Q, c_KV, ... in the paper) is the time of one transfer, in blocks of that pass. Rounded up, it
is the number of blocks that hide the transfer.
"""

import math
from collections import Counter
from functools import cache

from megatron.context_parallel.plan.ir import T

TileCell = tuple[int, int]  # (row, column)
Schedule = tuple[tuple[T | None, tuple[TileCell, ...]], ...]  # steps: the tensor to send, or None, and the blocks
TransferCosts = tuple[tuple[T, float], ...]

BACKWARD_BLOCK = 2.5  # forward blocks: five matrix products against two


@cache
def greedy_steps(a: int, b: int, backward: bool, costs: TransferCosts) -> Schedule:
    """The steps of the greedy algorithm: Alg. 2 forward, Alg. 3 backward."""
    return _Tile(a, b, backward, dict(costs)).steps()


class _Tile:
    """The blocks not computed yet, as bits: columns of each row (`rows`), and rows of each column (`columns`)."""

    def __init__(self, a: int, b: int, backward: bool, costs: dict[T, float]) -> None:
        self.a, self.b, self.backward, self.costs = a, b, backward, costs
        self.query = T.QDO if backward else T.Q
        self.results: tuple[T, ...] = (T.DQ, T.DKV) if backward else (T.O,)
        self.rows, self.columns = [(1 << b) - 1] * a, [(1 << a) - 1] * b
        self.moved: Counter[T] = Counter()  # communication done, by tensor

    def steps(self) -> Schedule:
        steps = []
        while any(self._pending(t) for t in (self.query, T.KV)):
            by_query = self._pending(self.query) * (self.moved[T.KV] + 1)  # blocks that a receive unlocks
            by_kv = self._pending(T.KV) * (self.moved[self.query] + 1)
            prefer_query = by_query / self.costs[self.query] > by_kv / self.costs[T.KV]
            steps.append(self._step(self.query if prefer_query else T.KV))
        while any(self._pending(t) for t in self.results):
            while not any(self._complete(t) for t in self.results):
                steps.append(self._step(None))
            for t in self.results:
                if self._complete(t):
                    steps.append(self._step(t))
        while any(self.rows):
            steps.append(self._step(None))
        return tuple(steps)

    def _pending(self, tensor: T) -> bool:
        return self.moved[tensor] < (self.b if tensor in (T.KV, T.DKV) else self.a) - 1

    def _complete(self, result: T) -> bool:
        """Whether all blocks of the row (column, for DKV) whose result is sent next have been computed."""
        lines = self.columns if result is T.DKV else self.rows
        return self._pending(result) and not lines[self.moved[result] + 1]

    def _step(self, tensor: T | None) -> tuple[T | None, tuple[TileCell, ...]]:
        blocks = []
        for _ in range(math.ceil(self.costs[tensor]) if tensor else 1):
            if (block := self._next()) is None:
                break
            u, v = block
            self.rows[u] &= ~(1 << v)
            self.columns[v] &= ~(1 << u)
            blocks.append(block)
        if tensor:
            self.moved[tensor] += 1
        return tensor, tuple(blocks)

    def _next(self) -> TileCell | None:
        """The next block that can be computed.

        Rows are computed in order, but the own row comes last, because no rank waits for it. In the backward pass rows
        and columns compete by their profit.
        """
        queries, keys = self.moved[self.query] + 1, self.moved[T.KV] + 1
        if self.backward and self._profit(T.DQ, self.rows) < self._profit(T.DKV, self.columns):
            block = _first(self.columns, keys, queries)
            return block and block[::-1]
        return _first(self.rows, queries, keys)

    def _profit(self, gradient: T, lines: list[int]) -> float:
        """The cost of the next gradient to send, divided by its missing blocks. Its own gradient is never sent."""
        lacking = next((line for line in lines[1:] if line), 0)
        return self.costs[gradient] / lacking.bit_count() if lacking else 0.0


def _first(lines: list[int], lines_ready: int, places_ready: int) -> TileCell | None:
    """The first block, as (line, place), in the first `lines_ready` lines, line 0 last, and `places_ready` places."""
    for line in (*range(1, lines_ready), 0):
        if ready := lines[line] & (1 << places_ready) - 1:
            return line, (ready & -ready).bit_length() - 1
    return None


def costs_by_bytes(backward: bool, kv_ratio: float, q_transfer_blocks: float) -> TransferCosts:
    """The cost of each tensor of a pass, if sending a chunk of queries takes `q_transfer_blocks` forward blocks.

    The other costs are proportional to their bytes in a 16-bit model, whose partials are float32.
    """
    if backward:
        chunks: TransferCosts = ((T.QDO, 2), (T.KV, 2 * kv_ratio), (T.DQ, 2), (T.DKV, 4 * kv_ratio))
    else:
        chunks = ((T.Q, 1), (T.KV, 2 * kv_ratio), (T.O, 2))
    block = BACKWARD_BLOCK if backward else 1
    return tuple((tensor, size * q_transfer_blocks / block) for tensor, size in chunks)
