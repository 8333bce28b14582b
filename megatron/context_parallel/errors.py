"""The error that is written for the user."""

from collections.abc import Callable, Iterable, Iterator


class UsageError(ValueError):
    """An invalid flag, shape, file or number of ranks.

    Each argument is a line: it names the given flag and value, and a value that works. Characters that cannot be
    printed, such as a line break in a value, are escaped. Programs print it without a traceback and exit with status 2.
    """

    def __str__(self) -> str:
        return "\n".join(map(_printable, self.args))


class RankError(UsageError):
    """An error on the host of one rank, and maybe of no other: this rank prints it without waiting for rank 0."""


def raise_all(errors: Iterable[UsageError]) -> None:
    """Raise the lines of several errors as one error, if there are any."""
    if lines := dict.fromkeys(line for error in errors for line in error.args):
        raise UsageError(*lines)


def caught(check: Callable[..., object], *given: object, **named: object) -> Iterator[UsageError]:
    """The error that a call raises, if any."""
    try:
        check(*given, **named)
    except UsageError as error:
        yield error


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
