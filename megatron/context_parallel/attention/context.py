"""The context group: its strategy, and how its ranks run a plan together."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.runtime.comm.communicators import group_of_this_rank, rendezvous
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.runtime.comm.torch_works import all_gather_single
from megatron.context_parallel.runtime.comm.transport import (
    LocalTransport,
    MessageQueue,
    Program,
    TorchTransport,
    run_all_ranks,
    run_rank,
)
from megatron.context_parallel.runtime.executor import Problem
from megatron.context_parallel.strategies import Choice, parse_spec, spec_text
from megatron.context_parallel.tokens.documents import Documents, placement_of
from megatron.context_parallel.tokens.handles import HasHandle
from megatron.context_parallel.tokens.layout import positions, shard, unshard
from megatron.context_parallel.tokens.placement import Placement

from .plans import Plans


class Ranks(HasHandle, ABC):
    """The ranks of a context group: their strategy, and how they run a plan together.

    Attributes:
        plans: the plans of the strategy.
        choice: the strategy and its options; n: the number of ranks; layout: which tokens a rank holds.
        chunks: the chunk of each rank.
        head_parallel_size: the number of parts of the heads; a group of ranks computes each.
        keeps_swapped: as in `Plan`.
        swapped_rows: rows that the backward pass gets of queries and keys, for each of the rank's tokens.
        local_ranks: the ranks of this process.
    """

    local_ranks: tuple[int, ...]

    def __init__(self, choice: Choice, n: int) -> None:
        self.plans = Plans(choice, n)
        self.choice, self.n, self.layout = choice, n, choice.layout
        self.chunks = self.plans.chunks
        self.head_parallel_size = n // self.plans.step_ranks
        self.keeps_swapped = self.plans.keeps_swapped
        self.swapped_rows = self.head_parallel_size if self.keeps_swapped else 1

    @property
    def in_rank_order(self) -> bool:
        """Whether each rank has the chunk of its number, as other libraries expect."""
        return self.chunks == [*range(self.n)]

    def compare_placements(self, placement: Placement) -> Callable[[], None]:
        """Starts to compare the placements of a batch on all ranks; they call it together.

        Returns:
            A function that waits for the result. It raises a UsageError if a rank has another placement.
        """
        return lambda: None

    @abstractmethod
    def length(self, x: Tensor) -> int:
        """The number of tokens of the whole sequence, if this process has `x` [s, ...]."""

    @abstractmethod
    def split(self, x: Tensor, placement: Placement | None) -> list[Tensor]:
        """The parts [length / n, ...] for the ranks of this process, in the layout or in a batch's own placement."""

    @abstractmethod
    def join(self, parts: list[Tensor], placement: Placement | None) -> Tensor:
        """The inverse of `split`."""

    @abstractmethod
    def sum_over_ranks(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """This process's part, in `dtype`, of a sum over the ranks; `parts` are the summands of its ranks."""

    @abstractmethod
    def run(self, program: Callable[..., Program], plan: Plan, problem: Problem, parts: list[tuple]) -> list:
        """Runs `program` on each rank of this process with its part of the inputs, and returns the results."""


class ContextParallel(Ranks):
    """A context group and how it computes attention. Create one per group and keep it, because it has communicators.

    All ranks of the group create it together, like a collective. Other ranks do not participate.

    Args:
        strategy: `--cp-strategy`, a name or a spec such as "mesh:grid=2x4" (`strategies.spec`). For "auto", give the
            result of `cluster.search.auto.resolve`.
        layout: `--cp-layout`; default: the strategy's own.
        group: the ranks that share a sequence, or a DeviceMesh of one dimension; default: the world.
        options: `head_parallel_size`, `head_rounds`, `placement`, `partials_in_16_bits`, and the options of the
            strategy.

    Attributes:
        group: the ranks that share a sequence; rank: this one in it.
        chunk: the chunk of the sequence that this rank owns. It is the rank in the group, unless a placement moves the
            data.

    Raises:
        UsageError: the strategy is unknown, or does not support the layout or an option; there is no process group, or
            this rank is not in it; a rank of the group has other arguments or another code of the strategy, or did not
            join within the group's timeout.
    """

    def __init__(
        self,
        strategy: str | Choice = "ring",
        layout: str | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        **options: object,
    ) -> None:
        group = group_of_this_rank(group)
        if not isinstance(layout, str | None):
            raise UsageError(f"layout: of type {type(layout).__name__}; give its name, and the group as group=...")
        # All ranks meet before any of them may raise.
        self._transport = TorchTransport(group, f"--cp-strategy {spec_text(strategy, layout=layout, **options)}")
        super().__init__(parse_spec(strategy, layout=layout, **options), dist.get_world_size(group))
        self.group, self.rank = group, dist.get_rank(group)
        self.local_ranks = (self.rank,)
        self.chunk = self.chunks[self.rank]
        causal = [self.choice.plan(self.n, backward=backward) for backward in (False, True)]
        full = [self.choice.plan(self.n, causal=False, backward=backward) for backward in (False, True)]
        if digest := self.plans.digest(causal + full):
            rendezvous(group, f"--cp-strategy {self.choice.spec} with code that writes the plans {digest}")
        self._transport.connect({needed for plan in causal for needed in plan.communicators(self.rank)})
        for plan in causal + full:  # others, such as for a window, have their first messages before they first run
            self._transport.connect_peers(plan)

    def shard(self, x: Tensor, dim: int = 0, documents: Documents | None = None) -> Tensor:
        """This rank's tokens of a full sequence: [..., length, ...] to [..., length / n, ...] along `dim`.

        If `documents` have a placement, the sequence is the whole batch, with its samples end to end.
        """
        if placement := placement_of(documents):
            return placement.shard(x, self.plans.placed_chunks[self.rank], self.n, dim)
        return shard(x, self.layout, self.chunk, self.n, dim)

    def positions(self, length: int, documents: Documents | None = None) -> Tensor:
        """Positions of this rank's tokens, int64 [length / n], in local order.

        If `documents` have a placement, they count through the whole batch, and `length` is that of the batch.
        """
        if placement := placement_of(documents):
            return placement.of_rank(self.plans.placed_chunks[self.rank], self.n)
        return positions(self.layout, self.chunk, self.n, length)

    def compare_placements(self, placement: Placement) -> Callable[[], None]:
        device = torch.device("cuda", torch.cuda.current_device()) if self._transport.nccl else torch.device("cpu")
        mine = to_device(torch.tensor([placement.digest()]), device)
        everyone = mine.new_empty(self.n)
        work = all_gather_single(everyone, mine, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            digests = everyone.tolist()  # the host waits for the GPU here
            for rank, digest in enumerate(digests):
                if digest != digests[0]:
                    raise UsageError(
                        f"documents: ranks 0 and {rank} of the context group have other placements; make them from "
                        "the same batch on every rank"
                    )

        return end

    def length(self, x: Tensor) -> int:
        return len(x) * self.n

    def split(self, x: Tensor, placement: Placement | None) -> list[Tensor]:
        return [x]

    def join(self, parts: list[Tensor], placement: Placement | None) -> Tensor:
        return parts[0]

    def sum_over_ranks(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """As in `Ranks`; the ranks call it together. If `dtype` rounds, rank 0 gets the sum, the others zeros."""
        (part,) = parts
        if part.dtype == dtype or self.n == 1:
            return part.to(dtype)
        dist.reduce(part, group=self.group, group_dst=0)
        return part.to(dtype) if self.rank == 0 else torch.zeros_like(part, dtype=dtype)

    def run(self, program: Callable[..., Program], plan: Plan, problem: Problem, parts: list[tuple]) -> list:
        recorder.begin(plan.name, plan.backward)
        self._transport.connect_peers(plan)
        results = [run_rank(program(plan, problem, self.rank, self._transport, *parts[0]))]
        recorder.end()
        return results


class AllRanks(Ranks):
    """All n ranks of a strategy in this process, on whole sequences: for checks, examples and a single GPU.

    Use it instead of a `ContextParallel`. Arguments and errors are the same.
    """

    def __init__(self, n: int, strategy: str | Choice = "ring", layout: str | None = None, **options: object) -> None:
        super().__init__(parse_spec(strategy, layout=layout, **options), n)
        self.local_ranks = tuple(range(n))

    def length(self, x: Tensor) -> int:
        return len(x)

    def split(self, x: Tensor, placement: Placement | None) -> list[Tensor]:
        if placement:
            return [placement.shard(x, chunk, self.n) for chunk in self.plans.placed_chunks]
        return [shard(x, self.layout, chunk, self.n) for chunk in self.chunks]

    def join(self, parts: list[Tensor], placement: Placement | None) -> Tensor:
        by_chunk = dict(zip(self.plans.placed_chunks if placement else self.chunks, parts, strict=True))
        in_order = [by_chunk[chunk] for chunk in range(self.n)]
        return placement.unshard(in_order) if placement else unshard(in_order, self.layout)

    def sum_over_ranks(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return sum(parts[1:], parts[0]).to(dtype)

    def run(self, program: Callable[..., Program], plan: Plan, problem: Problem, parts: list[tuple]) -> list:
        queues: dict[tuple[str, int, int], MessageQueue] = defaultdict(MessageQueue)
        programs = [program(plan, problem, r, LocalTransport(r, queues), *part) for r, part in enumerate(parts)]
        return run_all_ranks(programs, plan)
