"""The context group: its strategy, its plans and blocks, and how its ranks run a plan together."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.runtime.comm.communicators import joined
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.runtime.comm.transport import (
    LocalTransport,
    MessageQueue,
    Program,
    TorchTransport,
    run_all,
    run_here,
)
from megatron.context_parallel.runtime.executor import Problem
from megatron.context_parallel.strategies import Choice, asked, parse_spec
from megatron.context_parallel.tokens.handles import HasHandle
from megatron.context_parallel.tokens.layout import Chunks, positions, shard, unshard
from megatron.context_parallel.tokens.mask import Mask

ALL_RANKS_UP_TO = 64  # beyond, what goes through the steps of all ranks (verifying, plans by document) is left out
CACHED_PLANS = 32  # plans and blocks kept; those of packed documents change with each batch
Value = TypeVar("Value")
Lengths = tuple[int, int]  # queries and keys of the whole sequence


class _Strategy(HasHandle):
    """A strategy as chosen, and its plans for n ranks. Each is made once, and verified unless documents shape it."""

    def __init__(self, strategy: str | Choice, layout: str | None, n: int, options: dict[str, object]) -> None:
        self.choice, self.n = parse_spec(strategy, layout=layout, **options), n
        self.layout = self.choice.layout
        self._recent: OrderedDict[tuple, Any] = OrderedDict()
        plan = self.choice.plan(n)
        self.steps_on = plan.n  # ranks that run the steps of a plan together
        self.chunks = [plan.chunk_of(r) for r in range(n)]  # of each rank

    @property
    def head_parallel_size(self) -> int:
        """Parts of the heads, each of which a group of ranks computes."""
        return self.n // self.steps_on

    def plan(self, mask: Mask, lengths: Lengths, heads: int, kv_heads: int, *, backward: bool) -> Plan:
        """The plan of one pass. A strategy may leave out what the mask empties.

        Raises:
            UsageError: heads that the head-parallel size does not split.
        """
        if self.steps_on > ALL_RANKS_UP_TO:
            mask = Mask(mask.causal, mask.window)  # plans for the documents of each batch would take too long to make
        visible_pairs = self.cached(("sees", mask, lengths), lambda: mask.pairs(*self._chunks(lengths)))

        def make() -> Plan:
            plan = self.choice.plan(
                self.n, visible_pairs=visible_pairs, backward=backward, heads=heads, kv_heads=kv_heads
            )
            if mask.documents is None and plan.n <= ALL_RANKS_UP_TO:
                verify(plan)
            return plan

        return self.cached(("plan", visible_pairs, heads, kv_heads, backward), make)

    def full_plan(self, heads: int, kv_heads: int) -> Plan:
        """The plan of a forward pass in which every chunk may see every chunk, as chunks of any rows do."""
        return self.plan(Mask(causal=False), (2 * self.n, 2 * self.n), heads, kv_heads, backward=False)

    def _chunks(self, lengths: Lengths) -> tuple[Chunks, Chunks]:
        return Chunks.pair(self.layout, self.steps_on, *lengths)

    def blocks(self, mask: Mask, lengths: Lengths, kernel: Kernel) -> Blocks:
        """The blocks of `mask`, the same object for each layer of a model."""
        key = "blocks", mask, lengths, kernel
        undivided = self.blocks(Mask(mask.causal, mask.window), lengths, kernel) if mask.documents else None
        return self.cached(key, lambda: Blocks(mask, *self._chunks(lengths), kernel, undivided))

    def cached(self, key: tuple, make: Callable[[], Value]) -> Value:
        """What `make` made for `key`, or makes now. The oldest of what is kept is forgotten."""
        if key not in self._recent:
            self._recent[key] = make()
        self._recent.move_to_end(key)
        while len(self._recent) > CACHED_PLANS:
            self._recent.popitem(last=False)
        return self._recent[key]


class ContextParallel(_Strategy):
    """A context group and how it computes attention. Make one per group and keep it, because it has communicators.

    All ranks of the group make it together, as in a collective. Other ranks take no part.

    Args:
        strategy: `--cp-strategy`, a name or a spec such as "mesh:grid=2x4" (`strategies.spec`). For "auto" give what
            `cluster.search.auto.resolve` returns.
        layout: `--cp-layout`; default: the strategy's own.
        group: the ranks that share a sequence, or a DeviceMesh of one dimension; default: the world.
        options: `head_parallel_size`, `placement`, and the options of the strategy.

    Attributes:
        group: the ranks that share a sequence; rank: this one in it.
        chunk: the chunk of the sequence that this rank owns. It is the rank in the group, unless a placement moves the
            data.

    Raises:
        UsageError: the strategy is unknown, or does not work with the layout or an option; there is no process group,
            or this rank is not in it; a rank of the group was given something else, or did not come within the timeout
            of the group.
    """

    def __init__(
        self,
        strategy: str | Choice = "ring",
        layout: str | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        **options: object,
    ) -> None:
        group = joined(group)
        if not isinstance(layout, str | None):
            raise UsageError(f"layout: of type {type(layout).__name__}; give its name, and the group as group=...")
        # All meet before one may refuse what it was given.
        self._transport = TorchTransport(group, f"--cp-strategy {asked(strategy, layout=layout, **options)}")
        super().__init__(strategy, layout, dist.get_world_size(group), options)
        self.group, self.rank = group, dist.get_rank(group)
        self.chunk = self.chunks[self.rank]
        plans = [self.choice.plan(self.n, backward=backward) for backward in (False, True)]
        self._transport.connect({needed for plan in plans for needed in plan.communicators(self.rank)})

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's tokens of a full sequence: [..., length, ...] to [..., length / n, ...] along `dim`."""
        return shard(x, self.layout, self.chunk, self.n, dim)

    def positions(self, length: int) -> Tensor:
        """Positions of this rank's tokens, int64 [length / n], in local order."""
        return positions(self.layout, self.chunk, self.n, length)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        return (self.rank,)

    def length(self, x: Tensor) -> int:
        """Tokens of the whole sequence, of which `x` is this rank's part."""
        return len(x) * self.n

    def split(self, x: Tensor) -> list[Tensor]:
        return [x]

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def add_up(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's part, in `dtype`, of a sum over the ranks. They call this together.

        Where `dtype` rounds, the first rank gets the sum, rounded once, and the others zeros.
        """
        (part,) = parts
        if part.dtype == dtype or self.n == 1:
            return part.to(dtype)
        dist.reduce(part, group=self.group, group_dst=0)
        return part.to(dtype) if self.rank == 0 else torch.zeros_like(part, dtype=dtype)

    def run(self, program: Callable[..., Program], plan: Plan, problem: Problem, parts: list[tuple]) -> list:
        recorder.begin(plan.name, plan.backward)
        results = [run_here(program(plan, problem, self.rank, self._transport, *parts[0]))]
        recorder.end()
        return results


class AllRanks(_Strategy):
    """All n ranks of a strategy in this process, on whole sequences: for checks, examples and a single GPU.

    Use it in place of a `ContextParallel`. Arguments and errors are the same.
    """

    def __init__(self, n: int, strategy: str | Choice = "ring", layout: str | None = None, **options: object) -> None:
        super().__init__(strategy, layout, n, options)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.n))

    def length(self, x: Tensor) -> int:
        return len(x)

    def split(self, x: Tensor) -> list[Tensor]:
        return [shard(x, self.layout, chunk, self.n) for chunk in self.chunks]

    def join(self, parts: list[Tensor]) -> Tensor:
        by_chunk = dict(zip(self.chunks, parts, strict=True))
        return unshard([by_chunk[chunk] for chunk in range(self.n)], self.layout)

    def add_up(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return sum(parts[1:], parts[0]).to(dtype)

    def run(self, program: Callable[..., Program], plan: Plan, problem: Problem, parts: list[tuple]) -> list:
        post: dict[tuple[str, int, int], MessageQueue] = defaultdict(MessageQueue)
        programs = [program(plan, problem, r, LocalTransport(r, post), *part) for r, part in enumerate(parts)]
        return run_all(programs, plan)
