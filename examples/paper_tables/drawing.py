"""A table as the paper prints it, in text and as a picture: its numbers beside the predicted ones."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.table import Table

from .cells import Result, text

WIDE = 4  # columns of the paper side by side in 80 characters
SPREAD = 20  # times the smallest number that the largest is on a linear axis


def _labels(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    return [*dict.fromkeys(r.row for r in results)], [*dict.fromkeys(r.column for r in results)]


def side_by_side(results: Sequence[Result], title: str) -> Iterator[Table]:
    """The table in parts of a few columns. A cell is "paper | predicted", ? where the paper's number is withheld."""
    cells = {(r.row, r.column): r for r in results}
    rows, columns = _labels(results)
    for start in range(0, len(columns), WIDE):
        part = columns[start : start + WIDE]
        shown = Table("", title=title)
        for column in part:
            shown.add_column(column, justify="right")
        for row in rows:
            found = [cells.get((row, column)) for column in part]
            if any(found):
                shown.add_row(row, *("" if of is None else _cell(of) for of in found))
        yield shown


def _cell(result: Result) -> str:
    shown = f"{result.paper or '?'} | {text(result.predicted) or '-'}"
    return shown if result.measured is None else f"{shown} | {text(result.measured)}"


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """A panel for each unit: columns from left to right, a line of predictions for each row, the paper's as dots."""
    units = [*dict.fromkeys(r.unit for r in results)]
    figure, panels = pyplot.subplots(len(units), squeeze=False, figsize=(9, 4 * len(units)), layout="constrained")
    for axes, unit in zip(panels[:, 0], units, strict=True):
        _draw_panel(axes, [r for r in results if r.unit == unit])
        axes.set_ylabel(unit)
    figure.suptitle(f"{title}: predicted (lines), paper (dots), measured (crosses)", fontsize=10)
    _save(figure, path)


def _draw_panel(axes: pyplot.Axes, results: Sequence[Result]) -> None:
    rows, columns = _labels(results)
    for number, row in enumerate(rows):
        color = pyplot.get_cmap("tab20")(number % 20)
        for marker, line, value in (("_", "-", _predicted), ("o", "none", _paper), ("x", "none", _measured)):
            found = [(columns.index(r.column), value(r)) for r in results if r.row == row]
            if points := [point for point in found if point[1] is not None]:
                axes.plot(*zip(*points, strict=True), linestyle=line, marker=marker, color=color, markersize=5)
        axes.plot([], [], color=color, label=row)
    shown = [y for r in results for y in (_paper(r), r.predicted) if y]
    if shown and 0 < SPREAD * min(shown) < max(shown):
        axes.set_yscale("log")
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", fontsize=7)
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


def _paper(result: Result) -> float | None:
    return float(result.paper) if result.paper else None


def _predicted(result: Result) -> float | None:
    return result.predicted


def _measured(result: Result) -> float | None:
    return result.measured


def draw_residuals(results: Sequence[Result], title: str, path: Path) -> None:
    """The errors of a table in the order of its cells; fitted cells are hollow."""
    figure, axes = pyplot.subplots(figsize=(9, 3), layout="constrained")
    for fitted, face in ((True, "none"), (False, "tab:blue")):
        points = [(i, 100 * r.error) for i, r in enumerate(results) if r.error is not None and r.fitted is fitted]
        if points:
            label = "fitted" if fitted else "not fitted"
            axes.scatter(*zip(*points, strict=True), s=12, facecolors=face, edgecolors="tab:blue", label=label)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="cell, in reading order", ylabel="error, %", title=title)
    axes.legend(fontsize=7)
    _save(figure, path)


def _save(figure: pyplot.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)
