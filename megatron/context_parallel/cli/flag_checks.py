"""The checks that flags are declared with, and how a value of a flag is refused."""

import math
from typing import NoReturn

from megatron.context_parallel.errors import UsageError

from .flag import FlagSection


def refuse(args: FlagSection, name: str, why: str, **fits: object) -> NoReturn:
    """Raise the UsageError of the flag of field `name`. `fits` are values that work, by field."""
    advice = " ".join(args.declared[other].given(value) for other, value in fits.items())
    raise UsageError(f"{flag_text(args, name)}: {why}" + (f"; give {advice}" if fits else ""))


def flag_text(args: FlagSection, name: str) -> str:
    """The flag of field `name` with its value, `--num-layers 24`; what is no flag in words, `data parallel size 2`."""
    flag, value = args.declared.get(name), getattr(args, name)
    return flag.given(value) if flag else f"{name.replace('_', ' ')} {value}"


def is_given(args: FlagSection, condition: str) -> bool:
    """Whether a flag is given, or has the value named: "save", "recompute_granularity=full"."""
    name, _, value = condition.partition("=")
    return getattr(args, name) == value if value else getattr(args, name) != args.declared[name].default


def check_each(args: FlagSection, elsewhere: str = "") -> None:
    """Refuse what is missing, without what it needs or beside what it excludes, and files that cannot be written.

    `elsewhere` says where else a missing flag can come from.
    """
    for name, flag in args.declared.items():
        value, others = getattr(args, name), [other for other in flag.excludes.split() if is_given(args, other)]
        if value is None and flag.required and not others and not (flag.to_train and _trains_not(args)):
            raise UsageError(f"{flag.option}: missing; give {flag.works}{elsewhere}")
        if value == flag.default:
            continue
        if others:
            other = flag_text(args, others[0].partition("=")[0])
            refuse(args, name, f"does not go with {other}; give only one of the two")
        if missing := [_in_words(args, need) for need in flag.needs.split() if not is_given(args, need)]:
            refuse(args, name, f"needs {' '.join(missing)}; add that or leave this out")
        if flag.endings and value.suffix not in flag.endings:
            refuse(args, name, f"must end in {' or '.join(flag.endings)}; give {flag.works}")
        if flag.endings and not value.absolute().parent.is_dir():
            refuse(args, name, f"no folder {value.parent}; make it first")


def check_relations(args: FlagSection) -> None:
    """Refuse values that do not divide each other, or are above each other, though their flags declare it."""
    for name, flag in args.declared.items():
        if not (value := getattr(args, name)):
            continue
        for whole in flag.divides.split():
            if rest := (getattr(args, whole) or 0) % value:
                refuse(args, name, f"does not divide {flag_text(args, whole)}", **{name: math.gcd(value, rest)})
        if flag.multiple_of:
            check_multiple(args, name, *flag.multiple_of.split())
        if flag.not_above and value > (limit := getattr(args, flag.not_above) or math.inf):
            refuse(args, name, f"more than {flag_text(args, flag.not_above)}", **{name: limit})


def check_multiple(args: FlagSection, name: str, *of: str) -> None:
    """Refuse a value of field `name` that is no multiple of the product of others."""
    value = getattr(args, name)
    unit = math.prod(getattr(args, factor) for factor in of)
    if value % unit:
        product = " x ".join(flag_text(args, factor) for factor in of if getattr(args, factor) > 1)
        equals = f" = {unit}" if " x " in product else ""
        refuse(args, name, f"must be a multiple of {product}{equals}", **{name: max(value // unit, 1) * unit})


def _trains_not(args: FlagSection) -> bool:
    return any(getattr(args, name, False) for name in ("dry_run", "skip_train"))


def _in_words(args: FlagSection, condition: str) -> str:
    name, _, value = condition.partition("=")
    flag = args.declared[name]
    return flag.given(value) if value else flag.works
