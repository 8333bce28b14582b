"""The ranks that represent all ranks: after them, the steps, blocks and links of a plan repeat."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from megatron.context_parallel.plan.ir import Attend, Plan, Steps
from megatron.context_parallel.plan.repeats import moved_back
from megatron.context_parallel.tokens.rank_grid import RankGrid
from megatron.context_parallel.tokens.shift import Shift

from .block_time import BlockTime


@dataclass(frozen=True)
class Symmetry:
    """The ranks that are simulated. Each stands for those that are further by multiples.

    Attributes:
        grid: all ranks of the plan.
        shift: of the ranks of a group. A rank of the steps does what the rank does that stands for it.
        groups: of heads. Group g + `groups` is to the links what group g is.
    """

    grid: RankGrid
    shift: Shift
    groups: int

    @classmethod
    def none(cls, plan: Plan) -> "Symmetry":
        """Every rank stands for itself."""
        return cls(plan.grid, Shift(plan.n, plan.n), plan.head_parallel_size)

    @property
    def ranks(self) -> int:
        """Ranks of a group that are simulated: the first."""
        return self.shift.period

    @property
    def share(self) -> float:
        """Of all ranks, those that are simulated."""
        return self.ranks * self.groups / self.grid.size

    def representative(self, device: int) -> int:
        """The simulated device that stands for a device."""
        coordinates = self.grid.coordinates(device)
        return self.grid.rank(
            heads=coordinates["heads"] % self.groups, context=self.shift.representative(coordinates["context"])
        )

    def pair(self, sender: int, receiver: int) -> tuple[int, int]:
        """The pair of devices that stands for a pair: the sender's, and the receiver moved along with it."""
        first, last = self.grid.coordinates(sender), self.grid.coordinates(receiver)
        heads = (last["heads"] - first["heads"] + first["heads"] % self.groups) % (self.grid.size // self.shift.n)
        context = self.shift.moved(last["context"], self.shift.way_back(first["context"]))
        return self.representative(sender), self.grid.rank(heads=heads, context=context)


def symmetry_of(plan: Plan, blocks: BlockTime | Callable[[Attend], Hashable], links: int) -> Symmetry:
    """The fewest ranks that stand for all.

    The steps of a plan that declares its period are not read; `verify` checks what it declares. Otherwise the steps of
    all ranks are compared.

    Args:
        plan: the pass.
        blocks: the time of each block. Blocks for which a function returns the same take the same time.
        links: devices after which the links of the cluster repeat.
    """
    apart = plan.grid.rank(context=1)
    if plan.width > 1:  # rows and columns move together, both by whole nodes
        periods = [columns * plan.width for columns in _periods(plan.width, apart, links)]
    else:
        periods = [*_periods(plan.n, apart, links)]
    shifts = [Shift(plan.n, period, plan.width) for period in periods if period < plan.n]
    same = (shift for shift in shifts if plan.visible_pairs.repeats(shift) and _repeats(plan, blocks, shift))
    groups = next(_periods(plan.head_parallel_size, plan.grid.rank(heads=1), links))
    return replace(Symmetry.none(plan), shift=next(same, Shift(plan.n, plan.n)), groups=groups)


def _periods(size: int, apart: int, links: int) -> Iterator[int]:
    """Parts of a dimension of the grid after which the links repeat, and at last all of it.

    Its neighbours are `apart` devices apart.
    """
    for part in range(1, size):
        if size % part == 0 and part * apart % links == 0 and size * apart % links == 0:
            yield part
    yield size


def _repeats(plan: Plan, blocks: BlockTime | Callable[[Attend], Hashable], shift: Shift) -> bool:
    """Whether every rank does what the rank does that stands for it, in blocks that take the same time."""
    if plan.period and isinstance(blocks, BlockTime):
        return shift.period % plan.period == 0 and blocks.repeats(shift) and _gathered_repeat(plan, blocks, shift)
    look = blocks.look if isinstance(blocks, BlockTime) else blocks
    write = plan.steps.write if isinstance(plan.steps, Steps) else plan.steps.__getitem__  # keeps nothing
    first = dict[int, list]()
    for rank in range(shift.period, plan.n):
        representative = shift.representative(rank)
        if representative not in first:
            first[representative] = moved_back(representative, shift, write(representative), look)
        if moved_back(rank, shift, write(rank), look) != first[representative]:
            return False
    return True


def _gathered_repeat(plan: Plan, blocks: BlockTime, shift: Shift) -> bool:
    """Whether blocks of several chunks look alike after the first period, in the middle, and in the last."""
    moves = {shift.period, plan.n // (2 * shift.period) * shift.period, plan.n - shift.period}
    for rank in range(shift.period):
        for step in plan.steps[rank]:
            for block in step.attend:
                if len(block.q_chunks) == len(block.kv_chunks) == 1:
                    continue
                look = blocks.look(block)
                if any(blocks.look(_moved(block, shift, by)) != look for by in moves):
                    return False
    return True


def _moved(block: Attend, shift: Shift, by: int) -> Attend:
    q_chunks = tuple([shift.moved(chunk, by) for chunk in block.q_chunks])
    kv_chunks = tuple([shift.moved(chunk, by) for chunk in block.kv_chunks])
    return Attend(q_chunks, kv_chunks, block.heads)
