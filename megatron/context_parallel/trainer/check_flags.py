"""The checks that flags are declared with, and how a mistake is told."""

import math
from typing import NoReturn

from ..errors import UsageError
from .flags import FLAGS, Arguments, Flags


def refuse(args: Flags, name: str, why: str, **fits: object) -> NoReturn:
    """Raise the UsageError of the flag of field `name`. `fits` are values that work, by field."""
    advice = " ".join(FLAGS[other].given(value) for other, value in fits.items())
    raise UsageError(f"{given(args, name)}: {why}" + (f"; give {advice}" if fits else ""))


def given(args: Flags, name: str) -> str:
    """The flag of field `name` with its value, `--num-layers 24`; what is no flag in words, `data parallel size 2`."""
    value = getattr(args, name)
    return FLAGS[name].given(value) if name in FLAGS else f"{name.replace('_', ' ')} {value}"


def holds(args: Flags, condition: str) -> bool:
    """Whether a flag is given, or has the value named: "save", "recompute_granularity=full"."""
    name, _, value = condition.partition("=")
    return getattr(args, name) == value if value else getattr(args, name) != FLAGS[name].default


def check_each(args: Flags) -> None:
    """Refuse what is missing, without what it needs or beside what it excludes."""
    for name, flag in FLAGS.items():
        value, others = getattr(args, name), [other for other in flag.excludes.split() if holds(args, other)]
        if value is None and flag.required and not others and not (flag.to_train and args.dry_run):
            raise UsageError(f"{flag.option}: missing; give {flag.works}, or a --preset or --config that has it")
        if value == flag.default:
            continue
        if missing := [_in_words(need) for need in flag.needs.split() if not holds(args, need)]:
            refuse(args, name, f"needs {' '.join(missing)}; add that or leave this out")
        if others:
            other = given(args, others[0].partition("=")[0])
            refuse(args, name, f"does not go with {other}; give only one of the two")


def _in_words(condition: str) -> str:
    name, _, value = condition.partition("=")
    return FLAGS[name].given(value) if value else FLAGS[name].works


def check_relations(args: Arguments) -> None:
    """Refuse values that do not divide each other, or are above each other, though their flags declare it."""
    for name, flag in FLAGS.items():
        if not (value := getattr(args, name)):
            continue
        for whole in flag.divides.split():
            if rest := getattr(args, whole) % value:
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
