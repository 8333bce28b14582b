"""How the programs print tables, and that they are busy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.table import Table

_NO_END = 1000  # columns, where lines are not wrapped


def show(*tables: Table, file: IO[str] | None = None, width: int = _NO_END) -> None:
    """Prints tables to `file` (default: standard output), as wide as the terminal; nothing is cut, long cells fold.

    What is no terminal gets plain columns, `width` in all: no lines around them, and a line for each row if they fit.
    """
    console = Console(file=file, highlight=False)
    terminal = console.is_terminal
    if not terminal:
        console = Console(file=file, highlight=False, width=width)
    for table in tables:
        for column in table.columns:
            column.overflow = "fold"
        if not terminal:
            table.box = None
            table.pad_edge = False
        title, table.title, caption, table.caption = table.title, None, table.caption, None
        for text in filter(None, (title, table, caption)):
            console.print(text, markup=False)
        if table is not tables[-1]:
            console.print()


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """Says on the standard error what takes seconds: moving and transient on a terminal, else one line."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(f"{doing} ..."):
            yield
    else:
        console.print(f"{doing} ...", markup=False, soft_wrap=True)
        yield
