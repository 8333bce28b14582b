"""The checks that flags are declared with."""

from megatron.context_parallel.errors import UsageError

from .flag import Flag, FlagSection


def flag_text(args: FlagSection, name: str, flags: dict[str, Flag]) -> str:
    """The flag of field `name` with its value, `--num-layers 24`; what is no flag in words, `data parallel size 2`."""
    value = getattr(args, name)
    return flags[name].given(value) if name in flags else f"{name.replace('_', ' ')} {value}"


def is_given(args: FlagSection, condition: str, flags: dict[str, Flag]) -> bool:
    """Whether a flag is given, or has the value named: "save", "recompute_granularity=full"."""
    name, _, value = condition.partition("=")
    return getattr(args, name) == value if value else getattr(args, name) != flags[name].default


def check_each(args: FlagSection, flags: dict[str, Flag], elsewhere: str = "") -> None:
    """Refuse what is missing, without what it needs or beside what it excludes, and files that cannot be written.

    `elsewhere` says where else a missing flag can come from.
    """
    for name, flag in flags.items():
        value, others = getattr(args, name), [other for other in flag.excludes.split() if is_given(args, other, flags)]
        if value is None and flag.required and not others and not (flag.to_train and _trains_not(args)):
            raise UsageError(f"{flag.option}: missing; give {flag.works}{elsewhere}")
        if value == flag.default:
            continue
        text = flag_text(args, name, flags)
        if others:
            other = flag_text(args, others[0].partition("=")[0], flags)
            raise UsageError(f"{text}: does not go with {other}; give only one of the two")
        if missing := [_in_words(need, flags) for need in flag.needs.split() if not is_given(args, need, flags)]:
            raise UsageError(f"{text}: needs {' '.join(missing)}; add that or leave this out")
        if flag.endings and value.suffix not in flag.endings:
            raise UsageError(f"{text}: must end in {' or '.join(flag.endings)}; give {flag.works}")
        if flag.endings and not value.absolute().parent.is_dir():
            raise UsageError(f"{text}: no folder {value.parent}; make it first")


def _trains_not(args: FlagSection) -> bool:
    return any(getattr(args, name, False) for name in ("dry_run", "skip_train"))


def _in_words(condition: str, flags: dict[str, Flag]) -> str:
    name, _, value = condition.partition("=")
    return flags[name].given(value) if value else flags[name].works
