"""How a flag is declared: the `flag(...)` of a dataclass field says all there is to say about it."""

from dataclasses import dataclass, field, fields, replace
from inspect import get_annotations
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, dataclass_transform, get_args, get_origin, get_type_hints

from megatron.context_parallel.options import Option, kind_of, show


@dataclass(frozen=True)
class Flag(Option):
    """What is declared of a flag; it is required if it has neither a default, written or derived, nor None in its type.

    Several flags are named by their fields, with a value or without: "save load", "lr_decay_style=linear".
    """

    derived: str = ""  # the default in words, where other flags decide it
    # Its name on the command line: a switch that turns its field off has one of its own, a positional no dashes (DIR).
    option: str = ""
    unit: str = ""  # what the value counts or names, in capitals for --help
    needs: str = ""  # what must be given with it
    excludes: str = ""  # what must not
    divides: str = ""  # fields whose values are multiples of its own
    multiple_of: str = ""  # fields whose product divides its value
    not_above: str = ""  # the field that limits it
    endings: tuple[str, ...] = ()  # of a file to write, such as ".json"; its folder must be there
    to_train: bool = False  # not required by a dry run
    # What it decides that a checkpoint must share.
    decides: Literal["", "weights", "model", "position table", "data order"] = ""
    optional: bool = False  # None is a value: not given
    many: bool = False  # it takes several values
    adds_up: bool = False  # given again, it adds values; others replace them

    @property
    def required(self) -> bool:
        return not (self.optional or self.derived or self.default is not None)

    @property
    def positional(self) -> bool:
        return not self.option.startswith("-")

    def value(self, given: Any, n: int | None = None) -> Any:
        if self.many and given != []:
            return list(map(super().value, given if isinstance(given, list) else [given]))
        found = super().value(given, n)
        return found if self.kind is not bool or self.option == "--" + self.name.replace("_", "-") else not found

    def given(self, value: object) -> str:
        if self.kind is bool and not self.optional:
            return self.option
        return f"{self.option} {' '.join(map(show, value))}" if isinstance(value, list) else super().given(value)

    @property
    def works(self) -> str:
        """As a command line gives it a value that works."""
        return show(self.example) if self.positional else self.given(True if self.kind is bool else self.example)


def flag(help: str, default: object = None, **declared: Any) -> Any:
    """The field of a flag; `declared` are attributes of `Flag`."""
    return field(default=default, metadata={"flag": Flag(help, default=default, **declared)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(flag,))
class FlagSection:
    """Flags under one title in `--help`; subclasses are frozen dataclasses.

    A class of several sections has the flags of all, and may have fields that are no flags.

    Attributes:
        title: of the section.
        sections: those that a class is made of, in their order; a section is made of itself.
        declared: what is declared of each flag, by field.
    """

    title: ClassVar[str] = ""
    sections: ClassVar[tuple[type["FlagSection"], ...]] = ()
    declared: ClassVar[dict[str, Flag]] = {}

    def __init_subclass__(cls, title: str = "") -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.title = title
        cls.sections = tuple(section for base in cls.__bases__ for section in getattr(base, "sections", ()))
        cls.declared = {}
        for section in cls.sections:
            cls.declared |= section.declared
        if own := _own_flags(cls):
            cls.sections = (cls,)
            cls.declared |= own


def _own_flags(cls: type) -> dict[str, Flag]:
    """The flags that a class declares in its own body, by field."""
    body = get_annotations(cls)
    found = {entry.name: entry.metadata["flag"] for entry in fields(cls) if entry.name in body and entry.metadata}
    types = get_type_hints(cls) if found else {}
    return {name: _named(declared, name, types[name]) for name, declared in found.items()}


def _named(declared: Flag, name: str, hint: Any) -> Flag:
    kind, optional = kind_of(hint), NoneType in get_args(hint)
    if many := get_origin(kind) is list:
        kind = get_args(kind)[0]
    option = declared.option or "--" + name.replace("_", "-")
    read = declared.read or (Path if kind is Path else None)
    found = replace(declared, name=name, kind=kind, optional=optional, many=many, option=option, read=read)
    choices = f"{{{','.join(declared.choices)}}}" if declared.choices else ""
    unit = declared.unit or (option if found.positional else choices)
    unit = unit or {int: "N", float: "X", Path: "FILE"}.get(kind, "TEXT")
    made_up: object = 1 if kind is int else unit
    if declared.endings:
        made_up = name + declared.endings[0]
    known = (declared.example, declared.default, *declared.choices, made_up)
    return replace(found, unit=unit, example=next(value for value in known if value is not None))


def fields_given(args: object, config: type) -> dict[str, Any]:
    """What `args` has of the fields of a dataclass, by their names."""
    return {entry.name: getattr(args, entry.name) for entry in fields(config) if hasattr(args, entry.name)}


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another program, such as Megatron-LM.

    `nargs` is argparse's; `values` are those that it may have here, empty: any.
    """

    option: str
    nargs: str | int | None
    values: tuple[str, ...]
    says: str
    refused: bool
