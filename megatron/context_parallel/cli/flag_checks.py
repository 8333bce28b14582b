"""The checks that flags are declared with, and how a mistake is told."""

import math
from typing import NoReturn

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import FLAGS, Arguments, Flags

from .flag import Flag, Section


def refuse(args: Flags, name: str, why: str, **fits: object) -> NoReturn:
    """Raise the UsageError of the flag of field `name`. `fits` are values that work, by field."""
    advice = " ".join(FLAGS[other].given(value) for other, value in fits.items())
    raise UsageError(f"{given(args, name)}: {why}" + (f"; give {advice}" if fits else ""))


def given(args: Section, name: str, flags: dict[str, Flag] = FLAGS) -> str:
    """The flag of field `name` with its value, `--num-layers 24`; what is no flag in words, `data parallel size 2`."""
    value = getattr(args, name)
    return flags[name].given(value) if name in flags else f"{name.replace('_', ' ')} {value}"


def holds(args: Section, condition: str, flags: dict[str, Flag] = FLAGS) -> bool:
    """Whether a flag is given, or has the value named: "save", "recompute_granularity=full"."""
    name, _, value = condition.partition("=")
    return getattr(args, name) == value if value else getattr(args, name) != flags[name].default


def check_each(args: Section, flags: dict[str, Flag] = FLAGS) -> None:
    """Refuse what is missing, without what it needs or beside what it excludes."""
    for name, flag in flags.items():
        value, others = getattr(args, name), [other for other in flag.excludes.split() if holds(args, other, flags)]
        if value is None and flag.required and not others and not (flag.to_train and _trains_not(args)):
            elsewhere = ", or a --preset or --config that has it" if flags is FLAGS else ""
            raise UsageError(f"{flag.option}: missing; give {flag.works}{elsewhere}")
        if value == flag.default:
            continue
        if missing := [_in_words(need, flags) for need in flag.needs.split() if not holds(args, need, flags)]:
            raise UsageError(f"{given(args, name, flags)}: needs {' '.join(missing)}; add that or leave this out")
        if others:
            other = given(args, others[0].partition("=")[0], flags)
            raise UsageError(f"{given(args, name, flags)}: does not go with {other}; give only one of the two")


def _trains_not(args: Section) -> bool:
    return any(getattr(args, name, False) for name in ("dry_run", "skip_train"))


def _in_words(condition: str, flags: dict[str, Flag]) -> str:
    name, _, value = condition.partition("=")
    return flags[name].given(value) if value else flags[name].works


def check_relations(args: Arguments) -> None:
    """Refuse values that do not divide each other, or are above each other, though their flags declare it."""
    for name, flag in FLAGS.items():
        if not (value := getattr(args, name)):
            continue
        for whole in flag.divides.split():
            if rest := (getattr(args, whole) or 0) % value:
                refuse(args, name, f"does not divide {given(args, whole)}", **{name: math.gcd(value, rest)})
        if flag.multiple_of:
            check_multiple(args, name, *flag.multiple_of.split())
        if flag.not_above and value > (limit := getattr(args, flag.not_above) or math.inf):
            refuse(args, name, f"more than {given(args, flag.not_above)}", **{name: limit})


def check_multiple(args: Flags, name: str, *of: str) -> None:
    """Refuse a value of field `name` that is no multiple of the product of others."""
    value, unit = getattr(args, name), math.prod(getattr(args, factor) for factor in of)
    if value % unit:
        product = " x ".join(given(args, factor) for factor in of if getattr(args, factor) > 1)
        equals = f" = {unit}" if " x " in product else ""
        refuse(args, name, f"must be a multiple of {product}{equals}", **{name: max(value // unit, 1) * unit})


def check_sharers(args: Arguments, name: str) -> None:
    """Refuse a value of field `name` that does not divide the data x context ranks."""
    value, sharers = getattr(args, name), args.data_parallel_size * args.context_parallel_size
    if sharers % value:
        refuse(args, name, f"does not divide the {sharers} data x context ranks", **{name: math.gcd(sharers, value)})
