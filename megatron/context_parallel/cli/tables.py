"""Prints tables."""

from typing import IO

from rich.console import Console
from rich.table import Table

_NO_END = 1000  # columns, to avoid wrapping


def show(*tables: Table, file: IO[str] | None = None, width: int = _NO_END) -> None:
    """Prints tables to `file` (default: standard output), as wide as the terminal. Long cells are wrapped, not cut.

    Files and pipes get plain columns with a total of `width`: no borders, and one line per row if it fits.
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
