"""Megatron-LM's flags that this project does not have: accepted flags without effect, and refused ones.

`upstream_flags.txt` lists them, each with its values and a reason. Any other flag is rejected as unknown.
"""

from collections.abc import Iterator
from pathlib import Path

from megatron.context_parallel.cli.flag import ForeignFlag
from megatron.context_parallel.errors import UsageError

LIST = Path(__file__).with_name("upstream_flags.txt")


def _listed(wanted: str) -> Iterator[tuple[str, str]]:
    """The flags of a section of the list, with their values, and the reason of each."""
    section, reason = "", ""
    for line in LIST.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif not line.startswith(" "):
            reason = line
        elif section == wanted:
            yield line.strip(), reason


MEANS_NOTHING = dict(_listed("accepted without effect"))
GIVE_INSTEAD = dict(_listed("refused with an alternative"))


def _read(usage: str, says: str, refused: bool) -> ForeignFlag:
    option, *values = usage.removesuffix("...").split()
    nargs = "+" if usage.endswith("...") else 1 if values else None
    return ForeignFlag(option, nargs, tuple(value for value in values if not value.isupper()), says, refused)


_NOTHING = [_read(usage, says, False) for usage, says in MEANS_NOTHING.items()]
_REFUSED = [_read(usage, says, True) for usage, says in GIVE_INSTEAD.items()]
_OTHERS = [ForeignFlag(option, "*", (), says, True) for option, says in _listed("refused")]
UPSTREAM = {flag.option: flag for flag in _OTHERS + _NOTHING + _REFUSED}


def refused(given: dict[str, list[str]]) -> list[UsageError]:
    """The errors for the `given` flags of Megatron-LM (values by option) that would change the result."""
    errors = []
    for option, values in given.items():
        flag = UPSTREAM[option]
        other = [value for value in values if flag.values and value not in flag.values]
        if flag.refused:
            written = " ".join([option, *values])
            errors.append(UsageError(f"{written}: a flag of Megatron-LM that is not supported; {flag.says}"))
        elif other:
            advice = f"give {option} {flag.values[0]}, or leave it out"
            errors.append(UsageError(f"{option} {other[0]}: not supported; {advice}"))
    return errors


def without_effect(given: dict[str, list[str]]) -> list[str]:
    """A header and a line for each of the `given` flags of Megatron-LM that are accepted without effect."""
    lines = [f"  {option}: {UPSTREAM[option].says}" for option in given if not UPSTREAM[option].refused]
    return ["these flags of Megatron-LM are accepted, but have no effect:", *lines] if lines else []
