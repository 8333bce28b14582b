"""The ranks that represent all ranks: after them, the steps, blocks and links of a plan repeat."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from megatron.context_parallel.plan.ir import Attend, Plan, Steps
from megatron.context_parallel.plan.repeats import seen_from
from megatron.context_parallel.tokens.rank_grid import ProcessMesh

from .block_time import BlockTime


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


def symmetry_of(plan: Plan, blocks: BlockTime | Callable[[Attend], Hashable], links: int) -> Symmetry:
    """The fewest ranks that stand for all.

    The steps of a plan that declares its period are not read; `verify` checks what it declares. Otherwise the steps of
    all ranks are compared.

    Args:
        plan: the pass.
        blocks: the time of each block. Blocks for which a function returns the same take the same time.
        links: devices after which the links of the cluster repeat.
    """
    ranks = plan.n
    for period in _periods(plan.n, plan.grid.rank(context=1), links):
        if period == plan.n or (plan.visible_pairs.repeats(period) and _repeats(plan, blocks, period)):
            ranks = period
            break
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


def _repeats(plan: Plan, blocks: BlockTime | Callable[[Attend], Hashable], period: int) -> bool:
    """Whether rank r + `period` does what rank r does, for every r, in blocks that take the same time."""
    if plan.period and isinstance(blocks, BlockTime):
        return period % plan.period == 0 and blocks.repeats(period) and _gathered_repeat(plan, blocks, period)
    look = blocks.look if isinstance(blocks, BlockTime) else blocks
    write = plan.steps.write if isinstance(plan.steps, Steps) else plan.steps.__getitem__  # keeps nothing
    first = dict[int, list]()
    for rank in range(period, plan.n):
        like = rank % period
        if like not in first:
            first[like] = seen_from(like, plan.n, write(like), look)
        if seen_from(rank, plan.n, write(rank), look) != first[like]:
            return False
    return True


def _gathered_repeat(plan: Plan, blocks: BlockTime, period: int) -> bool:
    """Whether blocks of several chunks look alike after the first period, in the middle, and in the last."""
    shifts = {period, plan.n // (2 * period) * period, plan.n - period}
    for rank in range(period):
        for step in plan.steps[rank]:
            for block in step.attend:
                if len(block.q_chunks) == len(block.kv_chunks) == 1:
                    continue
                look = blocks.look(block)
                if any(blocks.look(_shifted(block, shift, plan.n)) != look for shift in shifts):
                    return False
    return True


def _shifted(block: Attend, by: int, n: int) -> Attend:
    q_chunks, kv_chunks = (tuple((chunk + by) % n for chunk in chunks) for chunks in (block.q_chunks, block.kv_chunks))
    return Attend(q_chunks, kv_chunks)
