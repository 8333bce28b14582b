"""From the command line and files of flags to `Flags`; what is no flag, or no value of it, is refused here."""

import argparse
import re
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError
from .declare import Flag, flags_of
from .flags import FLAGS, PRESETS, SECTIONS, Flags

_BY_OPTION = {flag.option: flag for flag in FLAGS.values()}


def read_flags(argv: list[str] | None = None) -> Flags:
    """The flags of `argv` (default: the program's), which win over those in `--config`, and these over `--preset`.

    Raises:
        UsageError: one line that names every unknown flag, or the flag whose value is none, and a value that works.
    """
    given = _parsed(argv)
    config = _of_file(Path(given["config"]), f"--config {given['config']}") if "config" in given else {}
    preset = (config | given).get("preset")
    values = _of_file(PRESETS[preset], f"--preset {preset}") if preset else {}
    return Flags(**(values | config | given))


def _parsed(argv: list[str] | None) -> dict[str, Any]:
    """The values that a command line gives, by field."""
    try:
        given, unknown = build_parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        flag = _BY_OPTION[str(error.argument_name).split("/")[0]]
        raise UsageError(f"{flag.option}: {error.message}; give {flag.works}") from None
    if unknown:
        raise UsageError(_explain_unknown(unknown))
    return {name: FLAGS[name].value(text) for name, text in vars(given).items()}


def _of_file(path: Path, source: str) -> dict[str, Any]:
    """The values that a YAML file gives, by field; null is as good as nothing."""
    try:
        values = yaml.safe_load(path.read_text())
        if not isinstance(values, dict) or "config" in values:
            raise ValueError("it must have flags, and not --config")
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{source}: cannot be read ({why}); write lines such as num-layers: 24") from None
    options = {"--" + str(name).replace("_", "-"): value for name, value in values.items()}
    try:
        if unknown := [option for option in options if option not in _BY_OPTION]:
            raise UsageError(_explain_unknown(unknown))
        given = [(_BY_OPTION[option], value) for option, value in options.items() if value is not None]
        return {flag.name: flag.value(_as_text(value)) for flag, value in given}
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _as_text(value: object) -> object:
    """A value of YAML as a command line gives it, but for true and false, which are no texts."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return value if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------------- help


def build_parser() -> argparse.ArgumentParser:
    """A parser of every flag, in groups by section. What it finds are texts, for `Flag.value` to read."""
    parser = argparse.ArgumentParser(
        description="Pretrain a GPT or Llama with tensor, pipeline, data and context parallelism. "
        "Flags have Megatron's names and meanings.",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    start = parser.prog if parser.prog.endswith(".py") else f"--no-python {parser.prog}"
    parser.usage = f"torchrun --nproc-per-node N {start} [--preset NAME] [flags]"
    for section in SECTIONS:
        group = parser.add_argument_group(section.title)
        for flag in flags_of(section).values():
            words: dict[str, Any] = {"nargs": "+" if flag.many else None, "metavar": flag.unit}
            if flag.kind is bool:
                words = {"action": argparse.BooleanOptionalAction if flag.optional else "store_true"}
            group.add_argument(flag.option, dest=flag.name, help=_help(flag), **words)
    return parser


def _help(flag: Flag) -> str:
    text = flag.help + "".join(f"; with {named(need)}" for need in flag.needs.split())
    text += "".join(f"; not with {named(other)}" for other in flag.excludes.split())
    if flag.required:
        text += "; required without it" if flag.excludes else "; required"
    default = flag.derived or (None if flag.kind is bool else flag.default)
    return (text if default is None else f"{text} (default: {default})").replace("%", "%%")


def named(condition: str) -> str:
    """A flag as a declaration names it, in words: "recompute_granularity=full" as `--recompute-granularity full`."""
    name, _, value = condition.partition("=")
    return FLAGS[name].given(value) if value else FLAGS[name].option


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
    alike = [
        name
        for name in (option[2:] for option in _BY_OPTION)
        if all(get_close_matches(part, name.split("-"), 1, 0.7) for part in given.split("-"))
    ]
    return next((f"--{name}" for name in get_close_matches(given, alike, 1, 0.7)), None)
