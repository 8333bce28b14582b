"""From the command line and files of flags to `Flags`; what is no flag, or no value of its type, is refused here."""

import argparse
import re
from argparse import ArgumentParser, Namespace
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

from ..errors import UsageError
from .declare import Flag, flags_of
from .flags import FLAGS, SECTIONS, Flags
from .presets import read_config, read_preset


def read_flags(argv: list[str] | None = None) -> Flags:
    """The flags of `argv` (default: the program's), which win over those in `--config`, and these over `--preset`.

    Raises:
        UsageError: one line that names every unknown flag, or the flag whose value is none, and a value that works.
    """
    parser = build_parser()
    given = _parse(parser, argv)
    config = _checked(parser, f"--config {given.config}", read_config(given.config)) if given.config else {}
    preset = given.preset or config.get("preset")
    values = _checked(parser, f"--preset {preset}", read_preset(str(preset))) if preset else {}
    return Flags(**vars(_parse(parser, argv, _parse(parser, _as_words(values | config)))))


# ----------------------------------------------------------------------------------------------------- parser


def build_parser() -> ArgumentParser:
    """The parser of every flag, in groups by section."""
    parser = ArgumentParser(
        prog="pretrain_gpt.py",
        usage="torchrun --nproc-per-node N pretrain_gpt.py [--preset NAME] [flags]",
        description="Pretrain a GPT or Llama with tensor, pipeline, data and context parallelism. "
        "Flags have Megatron's names and meanings.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    for section in SECTIONS:
        group = parser.add_argument_group(section.title)
        for flag in flags_of(section).values():
            group.add_argument(flag.option, dest=flag.name, default=flag.default, help=_help(flag), **_value(flag))
    return parser


def _help(flag: Flag) -> str:
    text = flag.help + "".join(f"; with {_named(need)}" for need in flag.needs.split())
    text += "".join(f"; not with {_named(other)}" for other in flag.excludes.split())
    if flag.required:
        text += f"; this or {FLAGS[flag.instead].option} is required" if flag.instead else "; required"
    default = flag.derived or (None if flag.kind is bool else flag.default)
    return (text if default is None else f"{text} (default: {default})").replace("%", "%%")


def _named(condition: str) -> str:
    name, _, value = condition.partition("=")
    return FLAGS[name].given(value) if value else FLAGS[name].option


def _value(flag: Flag) -> dict[str, Any]:
    """What argparse is to do with the words after a flag."""
    if flag.kind is bool:
        turns_on = flag.option.endswith(flag.name.replace("_", "-"))
        switch = {"action": "store_const", "const": turns_on}
        return {"action": argparse.BooleanOptionalAction} if flag.optional else switch
    words = {"choices": flag.choices or None, "metavar": flag.unit or None}
    if flag.kind is list:
        return {"nargs": "+", **words}
    return {"type": pair if flag.kind is tuple else flag.kind, **words}


def pair(text: str) -> tuple[int, int]:
    """`3x4`, `3,4` or `(3,4)` as (3, 4)."""
    first, second = map(int, text.strip("()").replace("x", ",").split(","))
    return first, second


def _parse(parser: ArgumentParser, words: list[str] | None, onto: Namespace | None = None) -> Namespace:
    """Parse `words` over the values in `onto`."""
    try:
        values, unknown = parser.parse_known_args(words, onto)
    except argparse.ArgumentError as error:
        flag = next(f for f in FLAGS.values() if f.option == str(error.argument_name).split("/")[0])
        advice = f"write {flag.option} alone" if flag.kind is bool else f"give {flag.works}"
        raise UsageError(f"{flag.option}: {error.message}; {advice}") from None
    if unknown:
        raise UsageError(_explain_unknown(unknown))
    return values


# ------------------------------------------------------------------------------------------------------ files


def _checked(parser: ArgumentParser, source: str, values: dict[str, object]) -> dict[str, object]:
    """`values`, if each is a flag with a value of its type; UsageErrors name the `source`."""
    if alone := values.keys() & {"config", "help"}:
        raise UsageError(f"{source}: {min(alone)} cannot be in a file; give it on the command line")
    try:
        _parse(parser, _as_words(values))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    return values


def _as_words(values: dict[str, object]) -> list[str]:
    """As a command line; `false` leaves a switch out, and turns off what has a --no-... of its own."""
    known = {flag.option: flag for flag in FLAGS.values()}
    words = []
    for name, value in values.items():
        option = f"--{name}"
        flag = known.get(option)
        if value is False and flag and flag.kind is bool:
            words += [f"--no-{name}"] * flag.optional
        elif isinstance(value, bool | list):
            words += [option, *map(str, value if isinstance(value, list) else ())]
        elif value is not None or flag is None:
            words.append(f"{option}={value}")
    return words


# ---------------------------------------------------------------------------------------------- unknown flags


def _explain_unknown(words: list[str]) -> str:
    # What follows an unknown flag may be its value; what stands before the first of them is nobody's.
    stray = [f"{word}: unknown word" for word in takewhile(lambda word: not _is_flag(word), words)]
    flags = {word: _closest(word) for word in (word.split("=")[0] for word in words if _is_flag(word))}
    unknown = [f"{word}: unknown flag" + (f" (did you mean {near}?)" if near else "") for word, near in flags.items()]
    advice = [] if flags and all(flags.values()) else ["--help lists the flags, such as --num-layers"]
    return "; ".join(stray + unknown + advice)


def _is_flag(word: str) -> bool:
    return re.match("--?[A-Za-z]", word) is not None


def _closest(word: str) -> str | None:
    """The flag that `word` is nearly spelled like and that has all its words: a --vocab-file is no --vocab-size."""
    given = word.strip("-").replace("_", "-").lower()
    likeness = {
        option: _likeness(given, option[2:])
        for option in (flag.option for flag in FLAGS.values())
        if all(max(_likeness(part, own) for own in option[2:].split("-")) > 0.7 for part in given.split("-"))
    }
    best = max(likeness, key=lambda option: likeness[option], default="")
    return best if likeness.get(best, 0) > 0.7 else None


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()
