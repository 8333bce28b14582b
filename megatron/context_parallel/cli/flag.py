"""The declaration of a flag: everything about it is in the `flag(...)` of a dataclass field."""

from dataclasses import dataclass, field, fields, replace
from inspect import get_annotations
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, dataclass_transform, get_args, get_origin, get_type_hints

from megatron.context_parallel.options import Option, kind_of, show


@dataclass(frozen=True)
class Flag(Option):
    """The declaration of a flag. A flag is required if it has no default, no derived default, and no None in its type.

    Lists of other flags name their fields, with a value or without: "save load", "lr_decay_style=linear".
    """

    derived: str = ""  # the default in words, if other flags determine it
    # Its name on the command line, if it differs: a switch that turns its field off, or a positional (DIR).
    option: str = ""
    unit: str = ""  # the kind of value, in capitals, for --help
    needs: str = ""  # flags that it requires
    excludes: str = ""  # flags that it cannot be combined with
    divides: str = ""  # fields that must be multiples of it
    multiple_of: str = ""  # fields whose product must divide it
    not_above: str = ""  # the field that limits it
    endings: tuple[str, ...] = ()  # allowed suffixes of a file to write, such as ".json"; its folder must exist
    to_train: bool = False  # not required by a dry run
    # What it decides that must be the same in a checkpoint.
    decides: Literal["", "weights", "model", "position table", "data order"] = ""
    optional: bool = False  # None is allowed and means not given
    many: bool = False  # it accepts several values
    adds_up: bool = False  # repeating it adds values; other flags replace them

    @property
    def required(self) -> bool:
        return not (self.optional or self.derived or self.default is not None)

    @property
    def positional(self) -> bool:
        return not self.option.startswith("-")

    def parse(self, given: Any, n: int | None = None) -> Any:
        if self.many and given != []:
            return list(map(super().parse, given if isinstance(given, list) else [given]))
        found = super().parse(given, n)
        return found if self.kind is not bool or self.option == "--" + self.name.replace("_", "-") else not found

    def as_flag(self, value: object) -> str:
        if self.kind is bool and not self.optional:
            return self.option
        if isinstance(value, tuple) and "," in self.unit:
            return f"{self.option} {','.join(map(str, value))}"
        return f"{self.option} {' '.join(map(show, value))}" if isinstance(value, list) else super().as_flag(value)

    @property
    def works(self) -> str:
        """An example on a command line."""
        return show(self.example) if self.positional else self.as_flag(True if self.kind is bool else self.example)


def flag(help: str, default: object = None, **declared: Any) -> Any:
    """The field of a flag; `declared` are attributes of `Flag`."""
    return field(default=default, metadata={"flag": Flag(help, default=default, **declared)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(flag,))
class FlagSection:
    """Flags under one title in `--help`; subclasses are frozen dataclasses.

    A class of several sections has the flags of all of them, and may have other fields.

    Attributes:
        title: the title of the section.
        sections: the sections of a class, in order; a section consists of itself.
        declared: the declaration of each flag, by field.
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
    """The flags declared in the body of a class, by field."""
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
    """The values in `args` of a dataclass's fields, by name."""
    return {entry.name: getattr(args, entry.name) for entry in fields(config) if hasattr(args, entry.name)}


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another program, such as Megatron-LM.

    `nargs` is argparse's; `values` are the accepted values; if empty, any.
    """

    option: str
    nargs: str | int | None
    values: tuple[str, ...]
    says: str
    refused: bool
