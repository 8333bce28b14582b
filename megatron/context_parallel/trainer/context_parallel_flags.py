"""The `--cp-...` flags: those of the context group, and one for each option that strategies declare."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ..backends import BACKENDS
from ..layout import LAYOUTS
from ..plan.ir import PLACEMENTS
from ..strategies import COMMON, STRATEGIES, Choice, Grid, Option, choose
from .declare import Section, flag

if TYPE_CHECKING:
    from .flags import Flags


class _Group(Section):
    context_parallel_size: int = flag("ranks that share each sequence", 1)
    cp_strategy: str = flag(
        f"distributed attention: {', '.join(STRATEGIES)}; NAME:OPTION=VALUE,... gives options, MODULE:NAME and "
        "FILE.py:NAME a strategy of your own",
        "ring",
        unit="SPEC",
    )
    cp_attention_backend: str = flag("what computes a rank's blocks of attention", "auto", choices=BACKENDS)


def _options() -> dict[str, dict[str, Option]]:
    """The options of all strategies, by name and then by strategy; those that all have come first, of no strategy."""
    found: dict[str, dict[str, Option]] = defaultdict(dict, {name: {"": option} for name, option in COMMON.items()})
    for strategy in STRATEGIES.values():
        for name, option in strategy.options.items():
            found[name][strategy.name] = option
    return found


_OPTIONS = _options()
_CHOICES = {"layout": LAYOUTS, "placement": PLACEMENTS}


def _declare(name: str) -> Any:
    by_strategy = _OPTIONS[name]
    help = "; ".join(f"{strategy}: {own.help}" if strategy else own.help for strategy, own in by_strategy.items())
    unit, option = {"grid": "RxC", "costs": "FILE"}.get(name, ""), next(iter(by_strategy.values()))
    return flag(help, unit=unit, example=option.example or None, choices=_CHOICES.get(name, ()))


def _type(name: str) -> Any:
    kind = next(iter(_OPTIONS[name].values())).kind
    return {int: int | None, bool: bool | None, Grid: tuple[int, int] | None}.get(kind, str | None)


_FIELDS: dict[str, Any] = {f"cp_{name}": _declare(name) for name in _OPTIONS}
if TYPE_CHECKING:

    class ContextParallel(_Group):
        cp_layout: str | None = flag("")

else:
    ContextParallel = type(
        "ContextParallel",
        (_Group,),
        {"__annotations__": {f"cp_{name}": _type(name) for name in _OPTIONS}, "__module__": __name__, **_FIELDS},
        title="context parallel",
    )


def chosen(args: "Flags") -> Choice:
    """The strategy and options that the `--cp-...` flags give.

    Raises:
        UsageError: an unknown strategy, or an option it does not have.
    """
    given = {name: getattr(args, f"cp_{name}") for name in _OPTIONS}
    for name, value in given.items():
        option = next(iter(_OPTIONS[name].values()))
        if option.read and value is not None:
            given[name] = option.read(value)
    return choose(args.cp_strategy, **given)
