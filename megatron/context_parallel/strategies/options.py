"""The options of a strategy: keyword-only parameters of its function, each with a type, a default and an `Option`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..errors import UsageError

Grid = tuple[int, int]


@dataclass(frozen=True)
class Option:
    """The declaration of an option: `grid: Annotated[Grid | None, Option("rows x columns", example="3x4")] = None`.

    Attributes:
        help: what it means, for `--help`.
        example: a value that works, as text.
        read: makes the value from text, for a type other than int, bool, str or Grid. It may raise UsageError.
        name: of the parameter. You need not give it, nor what follows.
        kind: the type of the parameter without "| None".
        default: of the parameter.
    """

    help: str
    example: str = ""
    read: Callable[[str], Any] | None = None
    name: str = ""
    kind: Any = str
    default: Any = None

    @property
    def flag(self) -> str:
        return "--cp-" + self.name.replace("_", "-")

    def from_text(self, text: str) -> Any:
        """The value that `text` gives. Raises UsageError if it gives none."""
        if self.read:
            return self.read(text)
        try:
            return self.checked(_KINDS[self.kind].read(text))
        except (ValueError, KeyError):
            raise self.refusal(text) from None

    def checked(self, value: object) -> Any:
        """`value`, if it is of the option's type; numbers must be 1 or more. Raises UsageError otherwise."""
        if self.read or (value is None and self.default is None) or _KINDS[self.kind].good(value):
            return value
        raise self.refusal(value)

    def refusal(self, value: object) -> UsageError:
        example = f", such as {self.example}" if self.example else ""
        return UsageError(f"{self.flag} {show(value)}: {_KINDS[self.kind].needs}{example}")


def show(value: object) -> str:
    """A value as a flag or a spec gives it."""
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


@dataclass(frozen=True)
class _Kind:
    read: Callable[[str], Any]
    good: Callable[[Any], bool]
    needs: str


def _read_grid(text: str) -> Grid:
    rows, columns = map(int, text.split("x"))
    return rows, columns


def _is_grid(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)


_SWITCH = {"true": True, "yes": True, "false": False, "no": False}
_KINDS: dict[Any, _Kind] = {
    int: _Kind(int, lambda x: type(x) is int and x > 0, "need a whole number, 1 or more"),
    bool: _Kind(lambda text: _SWITCH[text.lower()], lambda x: type(x) is bool, "give true or false"),
    str: _Kind(str, lambda x: isinstance(x, str), "need a text"),
    Grid: _Kind(_read_grid, _is_grid, "need two whole numbers"),
}


def options_of(function: Callable) -> dict[str, Option]:
    """The options a strategy's function declares.

    Raises:
        UsageError: a signature other than `(at: Pass, *, name: Annotated[type, Option(...)] = default, ...)`.
    """
    name, found = f"strategy {function.__name__}", dict[str, Option]()
    hints = get_type_hints(function, include_extras=True)
    first, *others = inspect.signature(function).parameters.values() or (None,)
    if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD:
        raise UsageError(f"{name}: its first parameter must be the pass, such as `at: Pass`")
    for parameter in others:
        kind, *notes = get_args(hints.get(parameter.name)) or (None,)
        declared = next((note for note in notes if isinstance(note, Option)), None)
        kind = next((x for x in get_args(kind) if x is not NoneType), kind) if NoneType in get_args(kind) else kind
        good = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
        if not good or not declared or not (declared.read or kind in _KINDS):
            raise UsageError(
                f"{name}: declare the option {parameter.name} after a `*`, with a type and a default, such as "
                f'{parameter.name}: Annotated[int, Option("what it means")] = 1'
            )
        found[parameter.name] = replace(declared, name=parameter.name, kind=kind, default=parameter.default)
    return found
