"""The numbers of the papers' tables and figures, and this project's prediction of each, as CSV files."""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.context_parallel.errors import UsageError

Wanted = Callable[[str, str], bool]  # whether the cell of a row and a column is asked for
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAPERS = {  # in the order of pages
    "attention2d": "ATTENTION2D",
    "lightseq": "LightSeq",
    "cp_inference": "Context Parallelism for Scalable Million-Token Inference",
    "mesh_attention": "Mesh-Attention",
    "loongtrain": "LoongTrain",
}


@dataclass(frozen=True)
class Cell:
    """A number of a paper.

    Attributes:
        row, column: labels, together unique in a table.
        unit: of the number; "x" is a ratio.
        paper: the number as the paper prints it; empty where it is withheld.
    """

    row: str
    column: str
    unit: str
    paper: str

    @property
    def value(self) -> float | None:
        return float(self.paper) if self.paper else None


@dataclass(frozen=True)
class Result:
    """A line of an output file: a cell, with its predicted and measured value or None."""

    table: str
    row: str
    column: str
    unit: str
    paper: str
    predicted: float | None
    measured: float | None
    fitted: bool

    @property
    def error(self) -> float | None:
        """Predicted / paper - 1; None where one of them is missing, or the paper has 0."""
        if not self.paper or not float(self.paper) or self.predicted is None:
            return None
        return self.predicted / float(self.paper) - 1

    def line(self) -> dict[str, str]:
        """The texts of `COLUMNS`."""
        error = "" if self.error is None else f"{100 * self.error:.2f}"
        numbers = {"predicted": text(self.predicted), "measured": text(self.measured), "error_percent": error}
        return {
            "table": self.table,
            "row": self.row,
            "column": self.column,
            "unit": self.unit,
            "paper": self.paper,
            **numbers,
            "fitted": "true" if self.fitted else "false",
        }


COLUMNS = ("table", "row", "column", "unit", "paper", "predicted", "measured", "error_percent", "fitted")


def words(path: Path) -> str:
    """The text of a template, as part of a page in docs/: links are relative to that folder."""
    return re.sub(r"\]\((?:\.\./)+docs/", "](", path.read_text()).strip() + "\n"


def text(value: float | None) -> str:
    """Five digits: more than the precision of any of these numbers, and equal on every machine."""
    return "" if value is None else f"{value:.5g}"


def tables_of(paper: str) -> list[str]:
    """The tables and figures of a paper, in its order.

    Raises:
        UsageError: no such paper.
    """
    if paper not in PAPERS:
        raise UsageError(f"PAPER {paper}: unknown; give one of {', '.join(PAPERS)}")

    def place(name: str) -> tuple[str, int]:
        kind, number = name.split("_")
        return ("table", "figure").index(kind), int(number)

    return sorted((path.stem for path in (HERE / paper).glob("*_[0-9]*.csv")), key=place)


def read_cells(paper: str, table: str) -> list[Cell]:
    """The cells of a table in reading order.

    Raises:
        UsageError: no such paper or table.
    """
    if table not in (known := tables_of(paper)):
        raise UsageError(f"TABLE {table}: {paper} has {', '.join(known)}")
    with (HERE / paper / f"{table}.csv").open(newline="") as file:
        return [Cell(**line) for line in csv.DictReader(file)]


def everything(row: str, column: str) -> bool:
    return True


def cell_by_cell(paper: str, table: str, predict: Callable[[Cell], float | None], wanted: Wanted) -> list[float | None]:
    """A number for each cell of a table; None where none is possible, and for cells that are not wanted."""
    return [predict(cell) if wanted(cell.row, cell.column) else None for cell in read_cells(paper, table)]


def every_third_row(paper: str, table: str) -> Callable[[str, str], bool]:
    """Whether the calibration may use a cell: the rule of this folder's README."""
    visible = [cell for cell in read_cells(paper, table) if cell.paper]
    chosen, count = set[str](), 0
    for row in list(dict.fromkeys(cell.row for cell in visible))[1::3]:
        count += sum(cell.row == row for cell in visible)
        if 3 * count > len(visible):
            break
        chosen.add(row)
    used = {(cell.row, cell.column) for cell in visible if cell.row in chosen}
    return lambda row, column: (row, column) in used


def results_file(paper: str, table: str, folder: Path) -> Path:
    return folder / f"{paper}_{table}.csv"


def read_results(path: Path) -> list[Result]:
    """What `write_results` wrote; nothing if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    known = {field.name for field in fields(Result)}

    def number(value: str) -> float | None:
        return float(value) if value else None

    results = []
    for line in lines:
        texts = {name: value for name, value in line.items() if name in known - {"predicted", "measured", "fitted"}}
        numbers = {name: number(line[name]) for name in ("predicted", "measured")}
        results.append(Result(**texts, **numbers, fitted=line["fitted"] == "true"))
    return results


def write_results(results: Sequence[Result], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.line() for result in results)
