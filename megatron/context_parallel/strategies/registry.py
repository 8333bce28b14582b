"""What a strategy is to everyone else: a name, the layouts it works with, and a function that writes plans."""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError
from ..plan.ir import Plan, Step


@dataclass(frozen=True)
class Strategy:
    """A strategy as registered.

    Attributes:
        name: its `--cp-strategy` value.
        layouts: the layouts it works with; the first is its default.
        rank_steps: `(rank, n, layout, causal, backward, **options) -> steps` of one rank.
        options: the keyword arguments it takes beyond those; each has a default there.
    """

    name: str
    layouts: tuple[str, ...]
    rank_steps: Callable[..., tuple[Step, ...]]
    options: tuple[str, ...] = ()

    def plan(
        self, n: int, *, layout: str | None = None, causal: bool = True, backward: bool = False, **options: object
    ) -> Plan:
        """The plan of one pass on n ranks, in `layout` (default: the strategy's own).

        Raises:
            UsageError: a layout or an option this strategy does not work with.
        """
        layout = layout or self.layouts[0]
        if layout not in self.layouts:
            raise UsageError(
                f"--cp-layout {layout}: {self.name} does not work with it; choose {' or '.join(self.layouts)}"
            )
        if unknown := options.keys() - set(self.options):
            own = ", ".join(self.options) or "none"
            raise UsageError(f"--cp-strategy {self.name}: no option {min(unknown)}; it has {own}")
        steps = tuple(self.rank_steps(r, n, layout, causal, backward, **options) for r in range(n))
        return Plan(self.name, layout, causal, backward, steps)


STRATEGIES: dict[str, Strategy] = {}


def register(name: str, layouts: tuple[str, ...], options: tuple[str, ...] = ()) -> Callable[[Callable], Strategy]:
    """Decorator: makes a function of one rank's steps available as `--cp-strategy name`."""

    def add(rank_steps: Callable) -> Strategy:
        STRATEGIES[name] = Strategy(name, layouts, rank_steps, options)
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
