"""The predictions of this project for the cells of a table, from the `predict.py` in each paper's folder."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

from megatron.context_parallel.cluster.description import Cluster, load_cluster

from .cells import PAPERS, Result, read_cells, read_results, results_file

MOST_FITTED = 1 / 3  # of the visible cells of a table


class Predictor(Protocol):
    """A paper's `predict.py`.

    Attributes:
        CLUSTER: the preset of each table's testbed.
        FITTED: `FITTED[table](row, column)` says whether the calibration of the testbed used a cell, if visible; of a
            table that is not there it used none.
    """

    CLUSTER: Mapping[str, str]
    FITTED: Mapping[str, Callable[[str, str], bool]]

    def predict(self, table: str, cluster: Cluster) -> list[float | None]:
        """A number for each cell of the table, in the order and the units of its CSV file; None: none is possible."""

    def command(self, table: str, row: str, column: str) -> str:
        """The command that measures a cell (`commands.py` writes it); empty: it follows from others, or from text."""


def predictor(paper: str) -> Predictor:
    return cast(Predictor, importlib.import_module(f"{__package__}.{paper}.predict"))


def predicted(paper: str, table: str, kept: Path) -> list[Result]:
    """The results of a table. What was measured is kept from the file of the same table in folder `kept`.

    Raises:
        ValueError: `predict` has another number of cells, or more of a table were fitted than `MOST_FITTED`.
    """
    cells, of = read_cells(paper, table), predictor(paper)
    values = of.predict(table, load_cluster(of.CLUSTER[table]))
    if len(values) != len(cells):
        raise ValueError(f"{paper} {table}: {len(values)} predictions for {len(cells)} cells")
    used = of.FITTED.get(table, lambda row, column: False)
    fitted = [bool(cell.paper) and used(cell.row, cell.column) for cell in cells]
    visible = sum(bool(cell.paper) for cell in cells)
    if sum(fitted) > MOST_FITTED * visible:
        raise ValueError(f"{paper} {table}: {sum(fitted)} cells fitted of {visible} visible ones; fit a third at most")
    measured = {(old.row, old.column): old.measured for old in read_results(results_file(paper, table, kept))}
    return [
        Result(table, cell.row, cell.column, cell.unit, cell.paper, value, measured.get((cell.row, cell.column)), use)
        for cell, value, use in zip(cells, values, fitted, strict=True)
    ]


def written() -> list[str]:
    """The papers whose predictions are written."""
    return [paper for paper in PAPERS if (Path(__file__).parent / paper / "predict.py").exists()]
