"""How a flag is declared: the `flag(...)` of a dataclass field says all there is to say about it."""

import math
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, ClassVar, Literal, dataclass_transform, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Flag:
    """What is declared of a flag; it is required if it has neither a default, written or derived, nor None in its type.

    `needs` and `excludes` name flags by their fields, with a value or without: "save load", "lr_decay_style=linear".
    """

    help: str  # without default and requirements, which follow
    default: object = None
    derived: str = ""  # the default in words, where other flags decide it
    unit: str = ""  # what the value counts or names, in capitals for --help
    example: object = None  # a value that works; without one the default, the first choice, 1 or the unit
    at_least: float | None = None  # None: a number is above 0
    at_most: float = math.inf
    below: float = math.inf
    choices: tuple[str, ...] = ()
    needs: str = ""  # what must be given with it
    excludes: str = ""  # what must not
    instead: str = ""  # the flag that takes its place
    to_train: bool = False  # not required by a dry run
    decides: Literal["", "weights", "position table", "optimizer", "data order"] = ""  # which a checkpoint must share
    option: str = ""  # its name on the command line; a switch that turns its field off has a name of its own
    name: str = ""  # of the field
    kind: type = str  # the type of the field, without "| None"
    optional: bool = False  # whether that was in it

    @property
    def required(self) -> bool:
        return not (self.optional or self.derived or self.default is not None)

    def given(self, value: object) -> str:
        """As a command line gives it `value`."""
        if self.kind is bool and not self.optional:
            return self.option
        return f"{self.option} {' '.join(map(str, value)) if isinstance(value, list) else value}"

    @property
    def works(self) -> str:
        """As a command line gives it a value that works."""
        known = (self.example, self.default, *self.choices, 1 if self.kind is int else self.unit)
        return self.option if self.kind is bool else self.given(next(value for value in known if value is not None))

    @property
    def bounds(self) -> str:
        """The bounds of a number in words."""
        low = (
            f"{self.at_least} or more" if self.at_least is not None else "1 or more" if self.kind is int else "above 0"
        )
        high = f", {self.at_most} at most" if self.at_most < math.inf else ""
        return low + high + (f", below {self.below}" if self.below < math.inf else "")

    def fits(self, number: float) -> bool:
        """Whether a number is within the bounds."""
        low = number > 0 if self.at_least is None else number >= self.at_least
        return low and number <= self.at_most and number < self.below


def flag(help: str, default: object = None, **declared: Any) -> Any:
    """The field of a flag; `declared` are attributes of `Flag`."""
    return field(default=default, metadata={"flag": Flag(help, default, **declared)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(flag,))
class Section:
    """Flags under one title in `--help`; subclasses are frozen dataclasses."""

    title: ClassVar[str] = ""

    def __init_subclass__(cls, title: str = "") -> None:
        cls.title = title
        dataclass(frozen=True, kw_only=True)(cls)


def flags_of(section: type) -> dict[str, Flag]:
    """The flags declared in a section, by field."""
    types = get_type_hints(section)
    return {entry.name: _named(entry.metadata["flag"], entry.name, types[entry.name]) for entry in fields(section)}


def _named(declared: Flag, name: str, type_: Any) -> Flag:
    optional = NoneType in get_args(type_)
    kind = get_args(type_)[0] if optional else type_
    option = declared.option or "--" + name.replace("_", "-")
    unit = declared.unit or ("" if declared.choices else {int: "N", float: "X"}.get(kind, "TEXT"))
    return replace(declared, name=name, kind=get_origin(kind) or kind, optional=optional, option=option, unit=unit)
