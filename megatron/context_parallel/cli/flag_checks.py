"""The declared checks of flags, and the errors about their values."""

import math
from collections.abc import Iterator
from typing import NoReturn

from megatron.context_parallel.errors import UsageError

from .flag import Flag, FlagSection


def refusal(args: FlagSection, name: str, why: str, **fits: object) -> UsageError:
    """The error of the flag of field `name`. `fits` are values that work, by field."""
    advice = " ".join(args.declared[other].as_flag(value) for other, value in fits.items())
    return UsageError(f"{flag_text(args, name)}: {why}" + (f"; give {advice}" if fits else ""))


def refuse(args: FlagSection, name: str, why: str, **fits: object) -> NoReturn:
    """Raise the `refusal`."""
    raise refusal(args, name, why, **fits)


def flag_text(args: FlagSection, name: str) -> str:
    """The flag of field `name` with its value, `--num-layers 24`; for other fields words, `data parallel size 2`."""
    flag, value = args.declared.get(name), getattr(args, name)
    return flag.as_flag(value) if flag else f"{name.replace('_', ' ')} {value}"


def is_given(args: FlagSection, condition: str) -> bool:
    """Whether a flag is given, or has a certain value: "save", "recompute_granularity=full"."""
    name, _, value = condition.partition("=")
    return getattr(args, name) == value if value else getattr(args, name) != args.declared[name].default


def check_each(args: FlagSection, elsewhere: str = "") -> Iterator[UsageError]:
    """The errors about missing flags, missing requirements, excluded combinations, and files that cannot be written.

    `elsewhere` names other sources of a missing flag.
    """
    told = set[str]()
    for name, flag in args.declared.items():
        if not told.isdisjoint(_fields(flag.excludes)):
            continue  # two flags that exclude each other get one error
        if error := _wrong(args, name, flag, elsewhere):
            told.add(name)
            yield error


def _wrong(args: FlagSection, name: str, flag: Flag, elsewhere: str) -> UsageError | None:
    """The error of one flag, alone or together with the flags that its declaration names."""
    value = getattr(args, name)
    others = [other for other in flag.excludes.split() if is_given(args, other)]
    if value is None and flag.required and not others and not (flag.to_train and _trains_not(args)):
        instead = [args.declared[other].works for other in _fields(flag.excludes) if args.declared[other].required]
        return UsageError(f"{flag.option}: missing; give {', or '.join([flag.works, *instead])}{elsewhere}")
    if value == flag.default:
        return None
    if others:
        other = flag_text(args, _fields(others[0])[0])
        return refusal(args, name, f"cannot be combined with {other}; give only one of the two")
    if missing := [_in_words(args, need) for need in flag.needs.split() if not is_given(args, need)]:
        return refusal(args, name, f"needs {' '.join(missing)}; add that or leave this out")
    if flag.endings and value.suffix not in flag.endings:
        return refusal(args, name, f"must end in {' or '.join(flag.endings)}; give {flag.works}")
    if flag.endings and not value.absolute().parent.is_dir():
        return refusal(args, name, f"the folder {value.parent} does not exist; create it first")
    return None


def _fields(conditions: str) -> list[str]:
    """The fields that conditions such as "save recompute_granularity=full" name."""
    return [condition.partition("=")[0] for condition in conditions.split()]


def check_relations(args: FlagSection) -> Iterator[UsageError]:
    """The errors about values that violate the declared divisibility or limits."""
    for name, flag in args.declared.items():
        if not (value := getattr(args, name)):
            continue
        for whole in flag.divides.split():
            if rest := (getattr(args, whole) or 0) % value:
                yield refusal(args, name, f"does not divide {flag_text(args, whole)}", **{name: math.gcd(value, rest)})
        if flag.multiple_of:
            yield from check_multiple(args, name, *flag.multiple_of.split())
        if flag.not_above and value > (limit := getattr(args, flag.not_above) or math.inf):
            advice = flag.as_flag(limit)
            if above := args.declared.get(flag.not_above):
                advice += f", or {above.as_flag(value)}"
            yield refusal(args, name, f"more than {flag_text(args, flag.not_above)}; give {advice}")


def check_multiple(args: FlagSection, name: str, *of: str) -> Iterator[UsageError]:
    """The error if the value of field `name` is not a multiple of the product of others."""
    value = getattr(args, name)
    unit = math.prod(getattr(args, factor) for factor in of)
    if value % unit:
        product = " x ".join(flag_text(args, factor) for factor in of if getattr(args, factor) > 1)
        equals = f" = {unit}" if " x " in product else ""
        why = f"must be a multiple of {product}{equals}"
        yield refusal(args, name, why, **{name: max(value // unit, 1) * unit})


def _trains_not(args: FlagSection) -> bool:
    return any(getattr(args, name, False) for name in ("dry_run", "skip_train"))


def _in_words(args: FlagSection, condition: str) -> str:
    name, _, value = condition.partition("=")
    flag = args.declared[name]
    return flag.as_flag(value) if value else flag.works
