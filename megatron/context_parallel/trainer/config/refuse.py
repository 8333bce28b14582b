"""How a value of a trainer's flag is refused, and the relations between values that flags declare."""

import math
from typing import NoReturn

from megatron.context_parallel.cli import flag_checks
from megatron.context_parallel.errors import UsageError

from .flags import FLAGS, Arguments, Flags


def refuse(args: Flags, name: str, why: str, **fits: object) -> NoReturn:
    """Raise the UsageError of the flag of field `name`. `fits` are values that work, by field."""
    advice = " ".join(FLAGS[other].given(value) for other, value in fits.items())
    raise UsageError(f"{flag_text(args, name)}: {why}" + (f"; give {advice}" if fits else ""))


def flag_text(args: Flags, name: str) -> str:
    """The flag of field `name` with its value, `--num-layers 24`; what is no flag in words, `data parallel size 2`."""
    return flag_checks.flag_text(args, name, FLAGS)


def check_relations(args: Arguments) -> None:
    """Refuse values that do not divide each other, or are above each other, though their flags declare it."""
    for name, flag in FLAGS.items():
        if not (value := getattr(args, name)):
            continue
        for whole in flag.divides.split():
            if rest := (getattr(args, whole) or 0) % value:
                refuse(args, name, f"does not divide {flag_text(args, whole)}", **{name: math.gcd(value, rest)})
        if flag.multiple_of:
            check_multiple(args, name, *flag.multiple_of.split())
        if flag.not_above and value > (limit := getattr(args, flag.not_above) or math.inf):
            refuse(args, name, f"more than {flag_text(args, flag.not_above)}", **{name: limit})


def check_multiple(args: Flags, name: str, *of: str) -> None:
    """Refuse a value of field `name` that is no multiple of the product of others."""
    value = getattr(args, name)
    unit = math.prod(getattr(args, factor) for factor in of)
    if value % unit:
        product = " x ".join(flag_text(args, factor) for factor in of if getattr(args, factor) > 1)
        equals = f" = {unit}" if " x " in product else ""
        refuse(args, name, f"must be a multiple of {product}{equals}", **{name: max(value // unit, 1) * unit})


def check_sharers(args: Arguments, name: str) -> None:
    """Refuse a value of field `name` that does not divide the data x context ranks."""
    value = getattr(args, name)
    sharers = args.data_parallel_size * args.context_parallel_size
    if sharers % value:
        refuse(args, name, f"does not divide the {sharers} data x context ranks", **{name: math.gcd(sharers, value)})
