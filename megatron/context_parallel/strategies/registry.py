"""What a strategy is to everyone else: a name, the layouts it works with, and a function that writes plans."""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError
from ..layout import Chunks
from ..mask import Mask, Pairs
from ..plan.ir import PLACEMENTS, Plan, Step


@dataclass(frozen=True)
class Strategy:
    """A strategy as registered.

    Attributes:
        name: its `--cp-strategy` value.
        layouts: the layouts it works with; the first is its default.
        rank_steps: `(rank, n, sees, backward, **options) -> steps` of one rank.
        options: the keyword arguments it takes beyond those; each has a default there.
        all_heads: it is head-parallel over the whole context group and writes steps of one rank only.
    """

    name: str
    layouts: tuple[str, ...]
    rank_steps: Callable[..., tuple[Step, ...]]
    options: tuple[str, ...] = ()
    all_heads: bool = False

    @property
    def option_names(self) -> str:
        return ", ".join(self.options) or "none"

    def plan(
        self,
        n: int,
        *,
        layout: str | None = None,
        causal: bool = True,
        sees: Pairs | None = None,
        backward: bool = False,
        head_parallel_size: int | None = None,
        placement: str = "head-first",
        **options: object,
    ) -> Plan:
        """The plan of one pass on n ranks, in `layout` (default: the strategy's own).

        `sees` says which pairs of chunks the mask leaves, of as many chunks as ranks run the steps together; default:
        those of a causal or full mask.

        With `head_parallel_size` (default 1, for `ulysses` n) the strategy runs on n / head_parallel_size ranks for
        a part of the heads. `placement` says which ranks are neighbours: those that share tokens ("head-first") or
        those that share heads ("context-first").

        Raises:
            UsageError: a layout, a size or an option this strategy does not work with.
        """
        layout = layout or self.layouts[0]
        if layout not in self.layouts:
            raise UsageError(
                f"--cp-layout {layout}: {self.name} does not work with it; choose {' or '.join(self.layouts)}"
            )
        if unknown := options.keys() - set(self.options):
            raise UsageError(f"--cp-strategy {self.name}: no option {min(unknown)}; it has {self.option_names}")
        if placement not in PLACEMENTS:
            raise UsageError(f"--cp-placement {placement}: unknown; choose {' or '.join(PLACEMENTS)}")
        if type(n) is not int or n < 1:
            raise UsageError(f"{n!r} ranks: need a whole number, 1 or more, such as 4")
        heads = self._head_parallel_size(n, head_parallel_size)
        m = n // heads
        if sees is None:
            chunks = Chunks.of(layout, m, 4 * m)
            sees = Mask(causal).pairs(chunks, chunks)
        steps = tuple(self.rank_steps(r, m, sees, backward, **options) for r in range(m))
        return Plan(self.name, layout, sees, backward, steps, heads, placement)

    def _head_parallel_size(self, n: int, given: int | None) -> int:
        size = given if given is not None else n if self.all_heads else 1
        if type(size) is not int or size < 1 or n % size:
            sizes = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
            raise UsageError(f"--cp-head-parallel-size {size}: does not divide {n} context ranks; give one of {sizes}")
        if self.all_heads and size < n:
            raise UsageError(
                f"--cp-head-parallel-size {size}: {self.name} spreads heads over all {n} context ranks; give {n}, or "
                "--cp-strategy usp"
            )
        return size


STRATEGIES: dict[str, Strategy] = {}


def register(
    name: str, layouts: tuple[str, ...], options: tuple[str, ...] = (), all_heads: bool = False
) -> Callable[[Callable], Strategy]:
    """Decorator: makes a function of one rank's steps available as `--cp-strategy name`."""

    def add(rank_steps: Callable) -> Strategy:
        STRATEGIES[name] = Strategy(name, layouts, rank_steps, options, all_heads)
        return STRATEGIES[name]

    return add


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    if name not in STRATEGIES:
        raise UsageError(f"--cp-strategy {name}: unknown; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
