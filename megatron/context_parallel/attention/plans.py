"""The plans of a strategy, and the blocks of a mask. Each is created once and cached while it is in use."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.options import divisors
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.row_sets import MetRows, RowSets
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.strategies import Choice
from megatron.context_parallel.tokens.documents import placement_of
from megatron.context_parallel.tokens.layout import Chunks, ListedChunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.placement import Placement
from megatron.context_parallel.tokens.slices import Slices

ALL_RANKS_UP_TO = 64  # with more ranks, work over the steps of all ranks (verifying, plans by document) is skipped
ROWS_UP_TO = 16  # with more ranks, the rows for the documents of a static layout would take too long to find
KEPT = 256  # plans and blocks in the cache: a batch of documents has about 8, and pipelines hold several batches
Cached = TypeVar("Cached")
Lengths = tuple[int, int]  # numbers of queries and keys of the whole sequence


class Plans:
    """The plans of a strategy for n ranks. Each is verified; of those for documents the first of each pass, if the
    strategy is of this package: to verify all takes long.

    Attributes:
        choice: the strategy and its options; n: the number of context ranks.
        step_ranks: the number of ranks that run the steps of a plan together; keeps_swapped: as in `Plan`.
        chunks: the chunk of each rank, of n in the layout; placed_chunks: of n equal parts of a batch's own placement.

    Raises:
        UsageError: the strategy does not work with n ranks, or with an option.
    """

    def __init__(self, choice: Choice, n: int) -> None:
        self.choice, self.n = choice, n
        plan = choice.plan(n)
        self.step_ranks, self.keeps_swapped = plan.n, plan.keeps_swapped
        self.chunks = [plan.chunk_of(rank) for rank in range(n)]
        self.placed_chunks = [_placed(plan).chunk_of(rank) for rank in range(n)]
        self._recent: OrderedDict[tuple, Any] = OrderedDict()
        self._verified_for_documents: set[tuple[bool, bool]] = set()  # with a placement or not, backward or not

    def of(self, mask: Mask, lengths: Lengths, heads: int, kv_heads: int, *, backward: bool) -> Plan:
        """The plan of one pass. A strategy may leave out pairs that the mask empties.

        Raises:
            UsageError: the head-parallel size does not split the heads.
        """
        placed = placement_of(mask.documents) is not None
        if self.step_ranks > ALL_RANKS_UP_TO and not placed:
            mask = Mask(mask.causal, mask.window)  # creating plans for the documents of each batch would take too long
        visible_pairs = self.cached(("visible pairs", mask, lengths), lambda: mask.pairs(*self._chunks(mask, lengths)))

        def make() -> Plan:
            plan = self.choice.plan(
                self.n, visible_pairs=visible_pairs, backward=backward, heads=heads, kv_heads=kv_heads
            )
            self._verify_once(plan, mask)
            if not in_order:
                plan = replace(plan, token_rounds=1)
            return _placed(plan) if placed else plan

        # Rounds of tokens need queries that see no later keys. Other masks have one round.
        in_order = mask.causal and mask.documents is None and lengths[0] == lengths[1]
        return self.cached(("plan", visible_pairs, placed, in_order, heads, kv_heads, backward), make)

    def _verify_once(self, plan: Plan, mask: Mask) -> None:
        """Verifies a new plan. Of those for documents, only the first ones if the strategy is of this package."""
        if plan.n > ALL_RANKS_UP_TO:
            return
        if mask.documents is not None and self.choice.of_pass(plan.backward).strategy.is_builtin:
            kind = placement_of(mask.documents) is not None, plan.backward
            if kind in self._verified_for_documents:
                return
            self._verified_for_documents.add(kind)
        verify(plan)

    def digest(self, plans: list[Plan]) -> str | None:
        """A digest of what all ranks do in plans of both passes; None if this package wrote them.

        The code of other strategies may differ between the ranks.
        """
        own = all(self.choice.of_pass(plan.backward).strategy.is_builtin for plan in plans)
        if own or self.step_ranks > ALL_RANKS_UP_TO:
            return None
        of_plans = repr([[*plan.steps] for plan in plans])
        return hashlib.sha256(of_plans.encode()).hexdigest()[:8]

    def full(self, heads: int, kv_heads: int) -> Plan:
        """The plan of a forward pass in which every chunk may see every chunk, for chunks with any rows."""
        return self.of(Mask(causal=False), (2 * self.n, 2 * self.n), heads, kv_heads, backward=False)

    def blocks(self, mask: Mask, lengths: Lengths, kernel: Kernel) -> Blocks:
        """The blocks of `mask`, the same object for each layer of a model."""
        key = "blocks", mask, lengths, kernel
        undivided = None
        if mask.documents and placement_of(mask.documents) is None:
            undivided = self.blocks(Mask(mask.causal, mask.window), lengths, kernel)
        return self.cached(key, lambda: Blocks(mask, *self._chunks(mask, lengths), kernel, undivided))

    def ranges(self, plan: Plan, mask: Mask, length: int, kernel: Kernel) -> tuple[Blocks, ...]:
        """With rounds of tokens, the blocks of each part of the queries and the keys up to its end.

        Raises:
            UsageError: the rounds do not divide the tokens of a rank.
        """
        tokens, rounds = length // plan.all_ranks, plan.token_rounds
        if rounds == 1:
            return ()
        if tokens % rounds:
            fits = ", ".join(str(d) for d in divisors(tokens) if d < 2 * rounds)
            raise UsageError(f"--cp-token-rounds {rounds}: does not divide the {tokens} tokens of a rank; give {fits}")
        each = length // rounds
        return tuple([self.blocks(mask, (each, (t + 1) * each), kernel) for t in range(rounds)])

    def row_sets(self, plan: Plan, blocks: Blocks) -> RowSets | None:
        """The rows that are sent, if the mask leaves any out; None: whole chunks."""
        mask = blocks.mask
        if mask.plain or isinstance(blocks.q, ListedChunks) or isinstance(blocks.kv, ListedChunks):
            return None
        if mask.documents and plan.n > ROWS_UP_TO and placement_of(mask.documents) is None:
            return None
        q, kv = Slices.of(blocks.q), Slices.of(blocks.kv)
        sizes = mask, q.rows, kv.rows
        met = self.cached(("met rows", *sizes), lambda: MetRows(mask, q, kv))  # of both passes
        return self.cached(("row sets", plan, *sizes), lambda: RowSets(plan, met))

    def cached(self, key: tuple, make: Callable[[], Cached]) -> Cached:
        """The cached result of `make` for `key`, or a new one. The oldest entry is evicted."""
        if key not in self._recent:
            self._recent[key] = make()
        self._recent.move_to_end(key)
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)
        return self._recent[key]

    def _chunks(self, mask: Mask, lengths: Lengths) -> tuple[Chunks | Placement, Chunks | Placement]:
        if placement := placement_of(mask.documents):
            return placement, placement
        return Chunks.pair(self.choice.layout, self.step_ranks, *lengths)


def _placed(plan: Plan) -> Plan:
    """The plan for a batch's own placement. A rank owns an equal part of its head group's chunk, as in this layout."""
    return replace(plan, layout="contiguous")
