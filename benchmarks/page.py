"""The tables of documentation pages that a script writes, between two comments."""

from pathlib import Path

END = "<!-- end -->\n"


def table_of(page: Path, script: str) -> list[str]:
    """The lines of the table that `script` wrote."""
    return _parts(page, script)[1].splitlines()


def write_table(page: Path, script: str, lines: list[str]) -> None:
    """Replaces the table of `script`."""
    before, _, after = _parts(page, script)
    page.write_text(before + "\n".join(lines) + "\n" + after)


def _parts(page: Path, script: str) -> tuple[str, str, str]:
    """The text before the table, the table, and the text after it."""
    before, begin, rest = page.read_text().partition(f"<!-- made by {script} -->\n")
    table, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: has no table of {script}")
    return before + begin, table, end + after
