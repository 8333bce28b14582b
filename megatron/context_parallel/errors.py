"""The one error a user is meant to read."""


class UsageError(ValueError):
    """A flag, shape, file or rank count that cannot work.

    The message is one line: it names what was given, its value, and a value that works. What cannot be printed, such as
    a line break in a given word, is escaped. Programs print it without a traceback and exit with status 2.
    """

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class RankError(UsageError):
    """What is wrong on the host of one rank, maybe of no other: it says so without waiting for rank 0."""
