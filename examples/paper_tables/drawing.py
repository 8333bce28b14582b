"""A table as the paper prints it in text, and pictures of predicted against printed numbers."""

import hashlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.table import Table

from .cells import Result, text
from .judged import Errors, percent

WIDE = 4  # columns of the paper side by side in 80 characters
SPREAD = 30  # times the smallest number that the largest is on a linear axis
ACROSS, PANEL = 4, 2.6  # panels side by side, and inches of one
BANDS = {10: "0.92", 2: "0.8"}  # percent about the diagonal, and their grey
POINT, MEASURED = "#0072B2", "#D55E00"


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


def draw(tables: Mapping[str, Sequence[Result]], title: str, path: Path) -> None:
    """Predicted against the paper: a panel for each table and unit, a point for each cell.

    A panel's title says how many of its cells can be compared. A unit without one has no panel. The file's
    `Description` is the digest of the points.

    Args:
        tables: the cells of each table, by its name.
        title: of the picture.
        path: of a PNG.
    """
    panels = [(name, unit, of) for name, results in tables.items() for unit, of in by_unit(results).items()]
    panels = [panel for panel in panels if Errors.of(panel[2])] or panels[:1]
    rows, columns = -(-len(panels) // ACROSS), min(ACROSS, len(panels))
    size = max(columns, 2) * PANEL, rows * (PANEL + 0.25) + 0.6  # room for the title and the legend
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, figsize=size, layout="constrained")
    for place in axes.flat:
        place.set_axis_off()
    for place, (name, unit, results) in zip(axes.flat, panels, strict=False):
        place.set_axis_on()
        _scatter(place, results)
        place.set_title(f"{name}, {unit}: {_summary(results)}", fontsize=7.5)
        place.set_xlabel("paper", fontsize=7.5)
        place.set_ylabel("predicted", fontsize=7.5)
    figure.suptitle(textwrap.fill(title, round(9 * size[0])), fontsize=11, weight="bold")
    handles = _legend([result for _, _, results in panels for result in results])
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) if columns > 2 else 2, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None, "Description": digest(tables)})
    pyplot.close(figure)


def draw_all(results: Sequence[Result], title: str, path: Path) -> None:
    """Predicted against the papers: all cells of all units in one panel, as in `draw`."""
    figure, axes = pyplot.subplots(figsize=(6.4, 6.6), layout="constrained")
    _scatter(axes, results)
    axes.set_title(textwrap.fill(title, 60), fontsize=10)
    axes.set_xlabel("paper")
    axes.set_ylabel("predicted")
    handles = _legend(results)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.savefig(path, dpi=80, metadata={"Software": None, "Description": digest({"all": results})})
    pyplot.close(figure)


def digest(tables: Mapping[str, Sequence[Result]]) -> str:
    """Equal for equal pictures, also of results that were written and read."""
    shown = []
    for name, results in tables.items():
        shown += [(name, r.unit, r.paper, text(r.predicted), text(r.measured), r.fitted) for r in results]
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def by_unit(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.unit, []).append(result)
    return found


def _scatter(axes: pyplot.Axes, results: Sequence[Result]) -> None:
    """The points of one unit, the diagonal, and bands about it."""
    shown = [r for r in results if r.error is not None]
    numbers = [y for r in shown for y in (float(r.paper), r.predicted, r.measured) if y]
    if not numbers:
        axes.text(0.5, 0.5, "nothing to compare", ha="center", va="center", transform=axes.transAxes, color="0.45")
        axes.set(xticks=[], yticks=[])
        return
    low, high = 0.85 * min(numbers), 1.15 * max(numbers)
    if max(numbers) > SPREAD * min(numbers):
        axes.set(xscale="log", yscale="log")
    for band, grey in BANDS.items():
        under, over = 1 - band / 100, 1 + band / 100
        axes.fill_between((low, high), (low * under, high * under), (low * over, high * over), color=grey, linewidth=0)
    axes.plot((low, high), (low, high), color="black", linewidth=0.6)
    for r in shown:
        face = "none" if r.fitted else POINT
        axes.plot(float(r.paper), r.predicted, "o", markersize=4, color=POINT, markerfacecolor=face, alpha=0.7)
        if r.measured is not None:
            axes.plot(float(r.paper), r.measured, "x", markersize=5, color=MEASURED)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.tick_params(labelsize=7)


def _summary(results: Sequence[Result]) -> str:
    """The errors of the predictions, and the number of cells."""
    found = Errors.of(results)
    if not found:
        return f"0 of {len(results)} cells"
    cells = f"{found.cells} of {len(results)} cells"
    return f"{cells}\nerror: median {percent(found.median)} %, worst {percent(found.worst)} %"


def _legend(results: Sequence[Result]) -> list[Line2D | Patch]:
    """What the marks are, of those that the panels have."""
    shown = [r for r in results if r.error is not None]
    handles: list[Line2D | Patch] = []
    for fitted, name in ((False, "a cell"), (True, "a cell that was fitted")):
        if any(r.fitted is fitted for r in shown):
            face = "none" if fitted else POINT
            handles.append(Line2D([], [], linestyle="", marker="o", color=POINT, markerfacecolor=face, label=name))
    if any(r.measured is not None for r in shown):
        handles.append(Line2D([], [], linestyle="", marker="x", color=MEASURED, label="measured against the paper"))
    return handles + [Patch(color=grey, label=f"within {band} %") for band, grey in reversed(BANDS.items())]
