"""Memory of a backward pass beyond the chunks and partials of its plan: kernels at work, messages of a head swap."""

from megatron.context_parallel.kernels.masks import CAUSAL, Piece
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
    """

    def __init__(self, plan: Plan, shape: Shape, blocks: Blocks | None) -> None:
        self.plan, self.shape, self.blocks = plan, shape, blocks
        self.part = shape.itemsize / 4
        # Bytes of a chunk in float32, for the heads of a round.
        self.queries = 4 * shape.rows * shape.heads * shape.head_dim // plan.rounds
        self.keys = 4 * shape.rows * max(shape.kv_heads, plan.head_parts) * shape.head_dim // plan.rounds
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
            computing, results = self._fused(count)
            return gathered + max(computing - counted, results)
        rows = self.blocks.q.rows(chunk)
        most = 0.0
        for piece in self.blocks.pieces(chunk, attend.kv_chunks):
            computing, results = self._unfused(piece, rows, count)
            most = max(most, computing - counted, results)
            counted = 0
        return gathered + most

    def _fused(self, count: int) -> tuple[float, float]:
        """Bytes while a block with `count` key chunks is computed, and of its results."""
        results = self.part * (self.queries + 2 * self.keys * count)
        of_heads = 2 * self.part * self.queries * count if self.grouped else 0.0
        return self.queries + self.part * self.queries + results + of_heads, results

    def _unfused(self, piece: Piece, rows: int, count: int) -> tuple[float, float]:
        """Bytes while a piece is computed, and of its results."""
        seen = len(range(*piece.kv.indices(rows * count))) / rows
        queries = self.queries * len(range(*piece.q.indices(rows))) / rows
        keys = self.keys * seen
        gradients = queries + 2 * self.queries * seen  # of a key for each query head
        computing = queries + gradients + (CAUSAL_PARTS if piece.mask == CAUSAL else 1) * queries
        if self.shape.itemsize < 4:
            computing += 2 * queries + 2 * keys  # float32 copies of the inputs
        return computing, queries + 2 * keys if self.grouped else gradients


def gradient_swap_bytes(plan: Plan, shape: Shape) -> float:
    """Bytes while gradients are swapped back to the ranks that own the tokens, beyond queries, keys and values.

    They are the output gradient as it came, the gradients of swapped heads and those of the rank's own tokens, and both
    messages.
    """
    queries = shape.rows * shape.heads * shape.head_dim
    keys = 2 * shape.rows * max(shape.kv_heads, plan.heads) * shape.head_dim
    of_keys = 4 if plan.heads > shape.kv_heads else shape.itemsize  # replicas are summed in float32
    swapped = shape.itemsize * queries + of_keys * keys
    others = (plan.heads - 1) / plan.heads
    return shape.itemsize * queries + (2 + 2 * others) * swapped


def packed_bytes(plan: Plan, shape: Shape) -> float:
    """With several rounds: bytes of the messages of two swaps in flight, beyond what `peak_bytes` counts of them."""
    if plan.rounds == 1:
        return 0.0
    others = (plan.heads - 1) / plan.heads
    swapped = sum(chunk_bytes(plan, t, shape, True) for op in (*plan.before, *plan.after) for t in op.tensors)
    return (2 * others - 1) * swapped
