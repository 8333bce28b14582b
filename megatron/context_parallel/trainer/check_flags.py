"""The checks that flags are declared with, and how a mistake is told."""

from typing import NoReturn

from ..errors import UsageError
from .declare import Flag
from .flags import FLAGS, Flags


def refuse(args: Flags, name: str, why: str, **fits: object) -> NoReturn:
    """Raise the UsageError of the flag of field `name`. `fits` are values that work, by field."""
    advice = " ".join(FLAGS[other].given(value) for other, value in fits.items())
    raise UsageError(f"{given(args, name)}: {why}" + (f"; give {advice}" if fits else ""))


def given(args: Flags, name: str) -> str:
    """The flag of field `name` with its value: `--num-layers 24` for num_layers."""
    return FLAGS[name].given(getattr(args, name))


def check_each(args: Flags) -> None:
    """Refuse what is missing, out of bounds, without what it needs or beside what it excludes."""
    for name, flag in FLAGS.items():
        value = getattr(args, name)
        if value is None and _is_required(args, flag):
            raise UsageError(f"{flag.option}: missing; give {flag.works}, or a --preset or --config that has it")
        if flag.kind in (int, float) and value is not None and not flag.fits(value):
            refuse(args, name, f"must be {flag.bounds}; give {flag.works}")
        if value != flag.default:
            _check_company(args, flag)


def _is_required(args: Flags, flag: Flag) -> bool:
    can_do_without = (flag.to_train and args.dry_run) or (flag.instead and _holds(args, flag.instead))
    return flag.required and not can_do_without


def _check_company(args: Flags, flag: Flag) -> None:
    instead = flag.instead and f"give {FLAGS[flag.instead].works}"
    if missing := [condition for condition in flag.needs.split() if not _holds(args, condition)]:
        needed = " ".join(_written(condition) for condition in missing)
        refuse(args, flag.name, f"needs {needed}; add that or {instead or 'leave this out'}")
    for condition in flag.excludes.split():
        if _holds(args, condition):
            other = given(args, condition.partition("=")[0])
            refuse(args, flag.name, f"does not go with {other}; {instead or 'give only one of the two'}")


def _written(condition: str) -> str:
    name, _, value = condition.partition("=")
    return FLAGS[name].given(value) if value else FLAGS[name].works


def _holds(args: Flags, condition: str) -> bool:
    """Whether a flag is given, or has the value named: "save", "recompute_granularity=full"."""
    name, _, value = condition.partition("=")
    return getattr(args, name) == value if value else getattr(args, name) != FLAGS[name].default
