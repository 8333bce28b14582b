"""The one error a user is meant to read."""

from collections.abc import Callable, Iterable, Iterator


class UsageError(ValueError):
    """A flag, shape, file or rank count that cannot work.

    Each argument is a line: it names what was given, its value, and a value that works. What cannot be printed, such as
    a line break in a given word, is escaped. Programs print it without a traceback and exit with status 2.
    """

    def __str__(self) -> str:
        return "\n".join(map(_printable, self.args))


class RankError(UsageError):
    """What is wrong on the host of one rank, maybe of no other: it says so without waiting for rank 0."""


def raise_all(errors: Iterable[UsageError]) -> None:
    """Raise the lines of several errors as one; nothing if there is none."""
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
