"""Memory of a backward pass beyond the chunks and partials of its plan: kernels at work, messages of a head swap."""

from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, PieceMask
from megatron.context_parallel.plan.ir import AllGather, Attend, Key, Plan, T
from megatron.context_parallel.plan.volume import Shape, chunk_bytes
from megatron.context_parallel.runtime.blocks import Blocks

# ATen on a CPU adds the parts of a causal square, in shares of its rows: DQ, DK and DV of the largest rectangle, then
# also those of the next one, with a copy of its output gradient.
CAUSAL_PARTS = 3 / 2 + 3 / 4 + 1 / 4


class BlockMemory:
    """The bytes of kernels on the blocks of a rank, for the backward pass of a plan.

    Args:
        blocks: cut each block into the pieces that ATen's kernel for a CPU computes, in float32. They may be those of a
            short sequence. None: flash attention on a GPU, which computes a block at once, with DQ in float32 (read in
            its source).
        tile: the share of a chunk's query rows that ATen's kernel computes at once under windows and documents.
    """

    def __init__(self, plan: Plan, shape: Shape, blocks: Blocks | None, tile: float = 1.0) -> None:
        self.plan, self.shape, self.blocks, self.tile = plan, shape, blocks, tile
        self.part = shape.itemsize / 4
        # Bytes of a chunk in float32, for the heads of a round.
        self.queries = 4 * shape.rows * shape.heads * shape.head_dim // plan.head_rounds
        self.kv_heads = max(shape.kv_heads, plan.head_parts)  # of all ranks of a head group, with replicas
        self.keys = 4 * shape.rows * self.kv_heads * shape.head_dim // plan.head_rounds
        self.grouped = self.queries > self.keys

    def of_steps(self, rank: int) -> list[float]:
        """The most bytes at once in each step of `rank`, with its own chunks in the buffers of all-gathers."""
        made: set[Key] = set()
        found = []
        copies = 0
        for step in self.plan.steps[rank]:
            gathers = [op for op in step.comm if isinstance(op, AllGather)]
            copies += sum(chunk_bytes(self.plan, op.tensor, self.shape, False) for op in gathers)
            gloo = 0  # its copy of what is gathered, until all is there
            if self.blocks is not None:
                gloo = sum(len(op.chunks) * chunk_bytes(self.plan, op.tensor, self.shape, False) for op in gathers)
            most = 0.0
            for attend in step.attend:
                for chunk in attend.q_chunks:
                    most = max(most, self._of_block(chunk, attend, made))
            found.append(copies + gloo + most)
        return found

    def _of_block(self, chunk: int, attend: Attend, made: set[Key]) -> float:
        """Bytes for one query chunk. Partials that it is the first to fill are counted by the plan already."""
        first = {(T.DQ, chunk), *((T.DKV, kv) for kv in attend.kv_chunks)} - made
        made |= first
        counted = sum(chunk_bytes(self.plan, tensor, self.shape, False, sent=False) for tensor, _ in first)
        count = len(attend.kv_chunks)
        gathered = 2 * self.keys * (1 + self.part) * count if count > 1 else 0.0  # keys, and their gradients
        if self.blocks is None:
            computing, results = self._fused(1, count)
            return gathered + max(attend.share * computing - counted, attend.share * results)
        rows = self.blocks.q.rows[chunk]
        most = 0.0
        for piece in self.blocks.pieces(chunk, attend.kv_chunks):
            q = len(range(*piece.q.indices(rows))) / rows
            kv = len(range(*piece.kv.indices(rows * count))) / rows
            computing, results = self._unfused(q, kv, piece.mask, rows)
            most = max(most, attend.share * computing - counted, attend.share * results)
            counted = 0
        return gathered + most

    def of_token_round(self, round_index: int) -> float:
        """The most bytes in a round of tokens: of its partial gradients, and of kernels at work on its queries."""
        number, rounds = self.plan.range_of(round_index), self.plan.token_rounds
        each, end = 1 / rounds, (number + 1) / rounds
        partials = each * self.queries + 2 * end * self.keys
        if self.blocks is None:
            return max(partials, *self._fused(each, end))
        square, results = self._unfused(each, each, CAUSAL)
        if number == 0:  # the results become the partials
            return max(square, results)
        before, results = self._unfused(each, number / rounds, FULL)  # a rectangle, then the square
        return max(before, partials + max(square, results))

    def _fused(self, q: float, kv: float) -> tuple[float, float]:
        """Bytes while a block of so many query and key chunks is computed, and of its results."""
        queries = q * self.queries
        results = self.part * (queries + 2 * self.keys * kv)
        of_heads = 2 * self.part * self.queries * kv if self.grouped else 0.0
        return queries + self.part * queries + results + of_heads, results

    def _unfused(self, q: float, kv: float, mask: PieceMask, rows: int = 1) -> tuple[float, float]:
        """Bytes while a piece of so many query and key chunks is computed, and of its results.

        `rows` are those of a chunk, for ranges of keys.
        """
        queries, keys = q * self.queries, kv * self.keys
        gradients = queries + 2 * self.queries * kv  # of a key for each query head
        if isinstance(mask, KeyRanges):  # the gradients of a tile are added to those
            at_work = self._of_tiles(mask, rows)
        else:
            at_work = (CAUSAL_PARTS if mask == CAUSAL else 1) * queries
        computing = queries + gradients + at_work
        if self.shape.itemsize < 4:
            computing += 2 * queries + 2 * keys  # float32 copies of the inputs
        if not self.grouped:
            return computing, gradients
        return max(computing, queries + gradients + 2 * keys), queries + 2 * keys  # sums over the query heads

    def _of_tiles(self, mask: KeyRanges, rows: int) -> float:
        """The most bytes of the gradients of a tile, with copies of its output gradient, queries, keys and values."""
        step = max(1, round(self.tile * rows))
        most = 0.0
        for first, end in zip(mask.first[0].split(step), mask.end[0].split(step), strict=True):
            keys = int(end[-1] - first[0])
            most = max(most, (3 * len(first) + 4 * keys) / rows * self.queries)
        return most


def partial_gradients_bytes(plan: Plan, shape: Shape) -> int:
    """With several rounds that share key/value heads: bytes of what `runtime/rounds.py` adds up, beyond `peak_bytes`.

    They are the partial gradients of a round, their sums so far if the gradients are in 16 bits, and copies of keys and
    values for the ranks that share them.
    """
    if plan.head_rounds == 1 or plan.head_parts <= shape.kv_heads:
        return 0
    received = chunk_bytes(plan, T.DKV, shape, True)
    heads = min(shape.kv_heads, plan.head_parallel_size)  # with partial gradients in a round
    sums = received * heads // plan.head_parallel_size if shape.itemsize < shape.partial_itemsize else 0
    return received + sums + (chunk_bytes(plan, T.KV, shape, True) if heads < plan.head_parallel_size else 0)


def gradient_swap_bytes(plan: Plan, shape: Shape) -> float:
    """Bytes while gradients are swapped back to the ranks that own the tokens, beyond queries, keys and values.

    They are the output gradient as it came, the gradients of swapped heads and those of the rank's own tokens, and both
    messages.
    """
    queries = shape.rows * shape.heads * shape.head_dim
    keys = 2 * shape.rows * max(shape.kv_heads, plan.head_parallel_size) * shape.head_dim
    of_keys = 4 if plan.head_parallel_size > shape.kv_heads else shape.itemsize  # replicas are summed in float32
    swapped = shape.itemsize * queries + of_keys * keys
    others = (plan.head_parallel_size - 1) / plan.head_parallel_size
    return shape.itemsize * queries + (2 + 2 * others) * swapped


def token_rounds_bytes(plan: Plan, shape: Shape, kernels: BlockMemory) -> float:
    """The most bytes in a backward pass in rounds of tokens, beyond queries, keys and values.

    From the second round on, a rank also has the partial gradients of all keys, and the gradients of its own tokens.
    """
    queries = shape.rows * shape.heads * shape.head_dim
    own_keys, keys = (2 * shape.rows * heads * shape.head_dim for heads in (shape.kv_heads, kernels.kv_heads))
    of_keys = 4 if plan.head_parallel_size > shape.kv_heads else shape.itemsize  # replicas are summed in float32
    others = (plan.head_parallel_size - 1) / plan.head_parallel_size
    messages = 2 * others / plan.token_rounds  # of a number: packed and received
    most = 0.0
    for round_index in range(plan.token_rounds):
        size = shape.itemsize * queries * (1 + 1 / plan.token_rounds)  # the output gradient as it came, and swapped
        if round_index < plan.token_rounds - 1:
            size += messages * shape.itemsize * queries
        if round_index:
            size += 4 * keys + shape.itemsize * queries + of_keys * own_keys
            size += messages * (shape.itemsize * queries + of_keys * keys)
        most = max(most, size + kernels.of_token_round(round_index))
    return most


def packed_bytes(plan: Plan, shape: Shape) -> float:
    """With several rounds: bytes of the messages of two swaps in flight, beyond what `peak_bytes` counts of them."""
    if plan.head_rounds == 1:
        return 0.0
    others = (plan.head_parallel_size - 1) / plan.head_parallel_size
    swapped = sum(chunk_bytes(plan, t, shape, True) for op in plan.swaps for t in op.tensors)
    return (2 * others - 1) * swapped
