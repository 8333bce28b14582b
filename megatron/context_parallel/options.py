"""Options given as text: the options of strategies, and the flags of the trainer."""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_type_hints

from megatron.context_parallel.errors import UsageError

Grid = tuple[int, int]


@dataclass(frozen=True)
class Option:
    """The declaration of an option: `grid: Annotated[Grid | None, Option("rows x columns", example="3x4")] = None`.

    Attributes:
        help: its meaning, for `--help`.
        example: a value that works.
        choices: all values that work.
        read: parses text, for types other than int, float, bool, str or Grid. It may raise ValueError.
        at_least, at_most, below: bounds of its numbers; without `at_least` they must be above 0.
        tries: `tries(n, q_transfer_blocks)` returns the values that the planner tries on n ranks, if a message of
            queries takes as long as q_transfer_blocks forward blocks. Without it the planner tries all grids of n
            ranks, both values of a switch, and only the default of other types.
        formerly: its former name, which is still accepted.
        name: the name of the parameter. This and the following attributes are derived from the signature.
        kind: the type of the parameter without "| None".
        default: the default of the parameter.
    """

    help: str
    example: Any = None
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    at_least: float | None = None
    at_most: float = math.inf
    below: float = math.inf
    tries: Callable[[int, float], Iterable[Any]] | None = None
    formerly: str = ""
    name: str = ""
    kind: Any = str
    default: Any = None

    @property
    def option(self) -> str:
        return "--cp-" + self.name.replace("_", "-")

    def parse(self, given: Any, n: int | None = None) -> Any:
        """The value of `given`, a text or a value. With n ranks, advice on a grid fits them. Raises UsageError."""
        if given is None and self.default is None:
            return None
        try:
            found = (self.read or _READ[self.kind])(given) if isinstance(given, str) else given
            good = self.fits(found)
        except UsageError:
            raise
        except (ValueError, KeyError):
            good = False
        if not good:
            raise UsageError(f"{self.option} {self.refusal(given, n)}")
        return found

    def fits(self, value: Any) -> bool:
        """Whether a value has the type, is one of the choices and is within the bounds. Results of `read` are."""
        if isinstance(value, bool | list):
            return self.kind is bool and value in (True, False)
        if self.choices or self.read:
            return value in self.choices or self.read is not None
        if self.kind in (int, float):
            return type(value) in (int, self.kind) and self._bounds_hold(value)
        if self.kind == Grid:
            pair = isinstance(value, tuple) and len(value) == 2
            return pair and all(type(x) is int and self._bounds_hold(x) for x in value)
        return isinstance(value, self.kind)

    def _bounds_hold(self, number: float) -> bool:
        low = number > 0 if self.at_least is None else number >= self.at_least
        return low and number <= self.at_most and number < self.below

    @property
    def bounds(self) -> str:
        """The bounds of its numbers in words."""
        whole = self.kind is int and self.at_least is None
        low = "1 or more" if whole else "above 0" if self.at_least is None else f"{self.at_least} or more"
        high = f", {self.at_most} at most" if self.at_most < math.inf else ""
        return low + high + (f", below {self.below}" if self.below < math.inf else "")

    def values_to_try(self, n: int, q_transfer_blocks: float) -> list[Any]:
        """The values that the planner tries; see `tries`."""
        if self.tries:
            return [*self.tries(n, q_transfer_blocks)]
        by_kind: dict[Any, list[Any]] = {bool: [True, False], Grid: [(r, n // r) for r in divisors(n)]}
        return by_kind.get(self.kind, [self.default])

    def as_flag(self, value: object) -> str:
        """The option with `value`, as on a command line."""
        if self.kind is bool:
            return self.option if value else self.option.replace("--", "--no-", 1)
        return f"{self.option} {show(value)}"

    def refusal(self, value: object, n: int | None = None) -> str:
        """A value that does not fit, and what would. With n ranks, an example of a grid fits them."""
        refused = show(value)
        if self.choices:
            closest = get_close_matches(str(value), self.choices, 8, cutoff=0)
            return f"{refused}: unknown; choose {' or '.join(closest)}"
        if self.kind is bool:
            return f"{refused}: give true or false"
        needs = {int: f"a whole number, {self.bounds}", float: f"a number, {self.bounds}", Grid: "two whole numbers"}
        rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0) if n else 0
        example = (rows, n // rows) if n and self.kind == Grid else self.example
        such = "" if example is None else f", such as {show(example)}"
        return f"{refused}: need {needs.get(self.kind, 'a text')}{such}"


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def show(value: object) -> str:
    """A value as written in a flag or a spec."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _pair(text: str) -> Grid:
    first, second = map(int, text.strip("()").replace("x", ",").split(","))
    return first, second


_SWITCH = {"true": True, "yes": True, "false": False, "no": False}
_READ: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: lambda text: _SWITCH[text.lower()],
    Grid: _pair,
}


def options_of(function: Callable) -> dict[str, Option]:
    """The options that a strategy's function declares.

    Raises:
        UsageError: no function, or a signature other than
            `(at: Pass, *, name: Annotated[type, Option(...)] = default, ...)`.
    """
    if not inspect.isroutine(function):
        kind = type(function).__name__
        raise UsageError(f"strategy of type {kind}: need a function that yields steps, such as def mine(at: Pass)")
    name = f"strategy {function.__name__}"
    found = dict[str, Option]()
    hints = get_type_hints(function, include_extras=True)
    first, *others = inspect.signature(function).parameters.values() or (None,)
    if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD:
        raise UsageError(f"{name}: its first parameter must be the pass, such as `at: Pass`")
    for parameter in others:
        kind, *notes = get_args(hints.get(parameter.name)) or (None,)
        declared = next((note for note in notes if isinstance(note, Option)), None)
        kind = kind_of(kind)
        good = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
        if not good or not declared or not (declared.read or kind in _READ):
            raise UsageError(
                f"{name}: declare the option {parameter.name} after a `*`, with a type and a default, such as "
                f'{parameter.name}: Annotated[int, Option("its meaning")] = 1'
            )
        option = replace(declared, name=parameter.name, kind=kind, default=parameter.default)
        if option.default is not None and not option.fits(option.default):
            raise UsageError(f"{name}: the default of the option {option.name}: {option.refusal(option.default)}")
        found[option.name] = option
    return found


def kind_of(hint: Any) -> Any:
    """A type without "| None"."""
    return next((x for x in get_args(hint) if x is not NoneType), hint) if NoneType in get_args(hint) else hint
