"""Cells that contradict other cells of their paper, or what is possible: listed, and counted separately."""

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence

from .cells import HERE, PAPERS, Result
from .judged import percent

Results = Mapping[tuple[str, str], Sequence[Result]]


def contradictions(paper: str) -> dict[tuple[str, str, str], str]:
    """Why a cell contradicts its paper, by table, row and column."""
    path = HERE / paper / "contradictions.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(line["table"], line["row"], line["column"]): line["why"] for line in csv.DictReader(file)}


def consistent(results: Results) -> Iterator[Result]:
    """The cells that do not contradict their paper."""
    for (paper, _), of in results.items():
        wrong = contradictions(paper)
        yield from (r for r in of if (r.table, r.row, r.column) not in wrong)


def contradiction_table(results: Results) -> str:
    """All of them with their predictions, and how far these are from them."""
    lines = ["| table | row | column | paper | predicted | why |", "|---|---|---|---|---|---|"]
    errors = []
    for (paper, _), of in results.items():
        wrong = contradictions(paper)
        for r in of:
            if why := wrong.get((r.table, r.row, r.column)):
                errors.append(100 * abs(r.error or 0.0))
                name = f"{PAPERS[paper]} {r.table.replace('_', ' ')}"
                lines.append(
                    f"| {name} | {r.row} | {r.column} | {r.paper} | {r.predicted:.4g} ({_signed(r)}) | {why} |"
                )
    return f"Their median error is {percent(statistics.median(errors))} %.\n\n" + "\n".join(lines)


def _signed(result: Result) -> str:
    return f"{100 * (result.error or 0.0):+.0f} %"
