"""Which ranks stand for all: those after which the steps, the blocks and the links of a plan repeat."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron.context_parallel.plan.ir import AllGather, Attend, Comm, Plan, ReduceScatter, Send, Steps
from megatron.context_parallel.tokens.chunk_pairs import rotated
from megatron.context_parallel.tokens.rank_grid import ProcessMesh


@dataclass(frozen=True)
class Symmetry:
    """The ranks that are simulated. Each stands for those that are further by multiples.

    Attributes:
        plan: the pass.
        ranks: of a group. Rank r + `ranks` of the steps does what rank r does, with all ranks and chunks further.
        groups: of heads. Group g + `groups` is to the links what group g is.
    """

    plan: Plan
    ranks: int
    groups: int

    @classmethod
    def none(cls, plan: Plan) -> "Symmetry":
        """Every rank stands for itself."""
        return cls(plan, plan.n, plan.heads)

    @cached_property
    def grid(self) -> ProcessMesh:
        return self.plan.grid

    @property
    def share(self) -> float:
        """Of all ranks, those that are simulated."""
        return self.ranks * self.groups / self.plan.size

    def like(self, device: int) -> int:
        """The simulated device that stands for a device."""
        at = self.grid.coordinates(device)
        return self.grid.rank(heads=at["heads"] % self.groups, context=at["context"] % self.ranks)


def symmetry_of(plan: Plan, look: Callable[[Attend], Hashable], links: int) -> Symmetry:
    """The fewest ranks that stand for all.

    Args:
        plan: the pass.
        look: blocks of the same look take the same time.
        links: devices after which the links of the cluster repeat.
    """
    apart = {"heads": plan.grid.rank(heads=1), "context": plan.grid.rank(context=1)}  # devices between neighbours

    def fits(dimension: str, size: int) -> Iterator[int]:
        for part in range(1, size):
            if size % part == 0 and part * apart[dimension] % links == 0 and size * apart[dimension] % links == 0:
                yield part
        yield size

    alike = _Alike(plan, look)
    return Symmetry(plan, next(filter(alike, fits("context", plan.n))), next(fits("heads", plan.heads)))


class _Alike:
    """Whether rank r + period does what rank r does, for every r."""

    def __init__(self, plan: Plan, look: Callable[[Attend], Hashable]) -> None:
        self.plan, self.look = plan, look
        self.write = plan.steps.write if isinstance(plan.steps, Steps) else plan.steps.__getitem__  # keeps nothing
        self.seen: dict[int, list] = {}  # what the first ranks do

    def __call__(self, period: int) -> bool:
        n, rows = self.plan.n, self.plan.visible_pairs.rows
        if period == n:
            return True
        if any(rotated(rows[(q + period) % n], period, n) != rows[q] for q in range(n)):
            return False
        for rank in range(period, n):
            first = self.seen.get(rank % period) or self.seen.setdefault(rank % period, self._does(rank % period))
            if first != self._does(rank):
                return False
        return True

    def _does(self, rank: int) -> list:
        """The work of a rank, seen from it."""
        n, work = self.plan.n, list[tuple]()
        for s, step in enumerate(self.write(rank)):
            for op in step.comm:
                work.append((s, *_turned(op, rank, n)))
            for block in step.attend:
                queries, keys = ([(c - rank) % n for c in chunks] for chunks in (block.q_chunks, block.kv_chunks))
                work.append((s, sorted(queries), sorted(keys), self.look(block)))
        return work


def _turned(op: Comm, rank: int, n: int) -> tuple:
    if isinstance(op, AllGather | ReduceScatter):
        members = sorted(((r - rank) % n, (c - rank) % n) for r, c in zip(op.group, op.chunks, strict=True))
        return type(op), op.tensor, op.channel, members
    return type(op) is Send, op.tensor, op.channel, (op.peer - rank) % n, (op.chunk - rank) % n
