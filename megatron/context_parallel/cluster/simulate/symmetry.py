"""The ranks that represent all ranks: after them, the steps, blocks and links of a plan repeat."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache

from megatron.context_parallel.plan.ir import AllGather, Attend, Comm, Plan, ReduceScatter, Send, Steps
from megatron.context_parallel.tokens.chunk_pairs import rotated
from megatron.context_parallel.tokens.rank_grid import ProcessMesh


@dataclass(frozen=True)
class Symmetry:
    """The ranks that are simulated. Each stands for those that are further by multiples.

    Attributes:
        grid: all ranks of the plan.
        ranks: of a group. Rank r + `ranks` of the steps does what rank r does, with all ranks and chunks further.
        groups: of heads. Group g + `groups` is to the links what group g is.
    """

    grid: ProcessMesh
    ranks: int
    groups: int

    @classmethod
    def none(cls, plan: Plan) -> "Symmetry":
        """Every rank stands for itself."""
        return cls(plan.grid, plan.n, plan.heads)

    @property
    def share(self) -> float:
        """Of all ranks, those that are simulated."""
        return self.ranks * self.groups / self.grid.size

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
    work = _Work(plan, look)
    periods = _periods(plan.n, plan.grid.rank(context=1), links)
    ranks = next(period for period in periods if work.repeats(period))
    groups = next(_periods(plan.heads, plan.grid.rank(heads=1), links))
    return Symmetry(plan.grid, ranks, groups)


def _periods(size: int, apart: int, links: int) -> Iterator[int]:
    """Parts of a dimension of the grid after which the links repeat, and at last all of it.

    Its neighbours are `apart` devices apart.
    """
    for part in range(1, size):
        if size % part == 0 and part * apart % links == 0 and size * apart % links == 0:
            yield part
    yield size


class _Work:
    """What the ranks of a plan do."""

    def __init__(self, plan: Plan, look: Callable[[Attend], Hashable]) -> None:
        self.plan, self.look = plan, look
        self.write = plan.steps.write if isinstance(plan.steps, Steps) else plan.steps.__getitem__  # keeps nothing
        self.of_first = cache(self._does)  # each of the first ranks is compared with many

    def repeats(self, period: int) -> bool:
        """Whether rank r + period does what rank r does, for every r."""
        n = self.plan.n
        rows = self.plan.visible_pairs.rows
        if period == n:
            return True
        if any(rotated(rows[(q + period) % n], period, n) != rows[q] for q in range(n)):
            return False
        return all(self.of_first(rank % period) == self._does(rank) for rank in range(period, n))

    def _does(self, rank: int) -> list:
        """The work of a rank, seen from it."""
        n = self.plan.n
        work = list[tuple]()
        for s, step in enumerate(self.write(rank)):
            for op in step.comm:
                work.append((s, *_turned(op, rank, n)))
            for block in step.attend:
                queries = sorted([(chunk - rank) % n for chunk in block.q_chunks])
                keys = sorted([(chunk - rank) % n for chunk in block.kv_chunks])
                work.append((s, queries, keys, self.look(block)))
        return work


def _turned(op: Comm, rank: int, n: int) -> tuple:
    if isinstance(op, AllGather | ReduceScatter):
        members = sorted(((r - rank) % n, (c - rank) % n) for r, c in zip(op.group, op.chunks, strict=True))
        return type(op), op.tensor, op.channel, members
    return type(op) is Send, op.tensor, op.channel, (op.peer - rank) % n, (op.chunk - rank) % n
