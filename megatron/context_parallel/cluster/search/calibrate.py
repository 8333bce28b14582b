"""Fits numbers of a cluster's description to published or measured numbers, within physical limits."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.fields import field_of, with_field
from megatron.context_parallel.errors import UsageError

MOST_FIELDS = 16  # that are fitted to one testbed
PULL = 0.02  # a field that is off its start by a factor of e counts like an error of 2 %
LARGE = 0.05  # errors above this count less than their squares
STEP = 0.03  # of the logarithm of a field, to see what it changes
DIGITS = 4  # of a fitted number
MOST_STEPS = 10


class Field(NamedTuple):
    """A number to fit: its start value, such as from a data sheet, and its bounds."""

    start: float
    least: float
    most: float


class Cell(NamedTuple):
    """A number that a prediction is compared with. `value` is None where it is not known."""

    table: str
    row: str
    column: str
    value: float | None
    fitted: bool = False

    @property
    def counts(self) -> bool:
        return bool(self.value)


class TableErrors(NamedTuple):
    """|predicted / known - 1| of the cells of a table.

    Attributes:
        fitted, others: of the cells that were used, and of those that were not.
        column: of each column, fitted without its cells.
        table: of all cells, fitted without any of them.
        testbed: of all cells, with every field at its start.
    """

    fitted: list[float]
    others: list[float]
    column: list[float]
    table: list[float]
    testbed: list[float]


class Predict(Protocol):
    def __call__(self, table: str, cluster: Cluster, wanted: Callable[[str, str], bool]) -> Sequence[float | None]:
        """A number for each cell of a table; anything for cells whose row and column are not wanted."""


class Calibration:
    """A fit of `fields` of a cluster to the fitted cells: least squares of the logarithms of predicted / known.

    Each field is also weakly pulled to its start, so fields that the cells do not determine do not change.

    Args:
        cluster: its other fields stay as they are.
        fields: by path, such as "device.attention[0].forward_TFLOP_s".
        cells: of all tables, each table's in the order of its predictions.
        predict: the predictions.

    Attributes:
        fitted: the cluster that fits best.
        begun: the cluster with every field at its start: what data sheets and guesses give.
        steps: how many times all fields were changed.

    Raises:
        UsageError: too many fields, an unknown one, one that starts out of its bounds or may exceed the device's peak,
            or no cell to fit.
    """

    def __init__(self, cluster: Cluster, fields: Mapping[str, Field], cells: Sequence[Cell], predict: Predict) -> None:
        from scipy.optimize import least_squares

        _check(cluster, fields)
        self.names, self.fields = list(fields), list(fields.values())
        self.cells, self.predict, self.known = cells, predict, cluster
        self.used = [cell for cell in cells if cell.fitted and cell.counts]
        if not self.used:
            raise UsageError(f"{cluster.name}: no cell is marked as fitted; select cells in FITTED")
        self.start = numpy.log([field.start for field in self.fields])
        least = numpy.log([field.least for field in self.fields])
        most = numpy.log([field.most for field in self.fields])
        self.bounds = least, most
        self.used = self._that_change()
        found = least_squares(
            self._off,
            self.start.clip(least, most),
            bounds=self.bounds,
            loss="soft_l1",
            f_scale=LARGE,
            jac=self._jacobian,
            xtol=1e-3,
            ftol=1e-3,
            max_nfev=MOST_STEPS,
        )
        self.steps, self.at, self.residuals = found.nfev, found.x, found.fun
        self.fitted, self.begun = self._cluster(self.at), self._cluster(self.start)

    def errors(self, cells: Collection[Cell], cluster: Cluster) -> dict[Cell, float]:
        """|predicted / known - 1| of cells, without those that are not known or not predicted."""
        return {cell: abs(math.exp(off) - 1) for cell, off in self._logs(cells, cluster).items()}

    def judge(self, table: str) -> TableErrors:
        """How well the cells of a table are predicted, also where fewer cells were used."""
        own = [cell for cell in self.cells if cell.table == table and cell.counts]
        found, columns = self.errors(own, self.fitted), {cell.column for cell in own if cell.fitted}
        column = [error for cell, error in found.items() if cell.column not in columns]
        for name in columns:
            out = [cell for cell in own if cell.column == name]
            column += self.errors(out, self.without(out)).values()
        return TableErrors(
            [error for cell, error in found.items() if cell.fitted],
            [error for cell, error in found.items() if not cell.fitted],
            column,
            [*self.errors(own, self.without(own)).values()],
            [*self.errors(own, self.begun).values()],
        )

    def without(self, left_out: Collection[Cell]) -> Cluster:
        """The cluster that fits the fitted cells beside some: one step from the best fit, as all cells change it."""
        from scipy.optimize import lsq_linear

        out = {*left_out}
        keep = [i for i, cell in enumerate(self.used) if cell not in out]
        if len(keep) == len(self.used):
            return self.fitted
        rows = [*keep, *range(len(self.used), len(self.residuals))]
        sizes = numpy.sqrt(1 / numpy.sqrt(1 + (self.residuals[rows] / LARGE) ** 2))  # as soft_l1 weighs them
        matrix = self._jacobian_at_fit[rows] * sizes[:, None]
        goal = -self.residuals[rows] * sizes
        least, most = (side - self.at for side in self.bounds)
        step = lsq_linear(matrix, goal, (least - 1e-9, most + 1e-9)).x
        return self._cluster((self.at + step).clip(*self.bounds))

    def _that_change(self) -> list[Cell]:
        """The used cells that some field changes. The others would hide from the fit how much it still gains."""
        here, there = (self._logs(self.used, self._cluster(self.start + step)) for step in (0, -STEP))
        return [cell for cell in self.used if here.get(cell) != there.get(cell) or cell not in here]

    def _off(self, at: numpy.ndarray) -> numpy.ndarray:
        logs = self._logs(self.used, self._cluster(at))
        if missing := [cell for cell in self.used if cell not in logs]:
            raise UsageError(f"{missing[0].table}: no prediction for {missing[0].row}, {missing[0].column}")
        return numpy.array([*logs.values(), *(PULL * (at - self.start))])

    def _jacobian(self, at: numpy.ndarray) -> numpy.ndarray:
        here = self._off(at)
        columns = []
        for i, most in enumerate(self.bounds[1]):
            step = STEP if at[i] + STEP <= most else -STEP
            moved = at.copy()
            moved[i] += step
            columns.append((self._off(moved) - here) / step)
        return numpy.stack(columns, axis=1)

    @cached_property
    def _jacobian_at_fit(self) -> numpy.ndarray:
        return self._jacobian(self.at)

    def _logs(self, cells: Collection[Cell], cluster: Cluster) -> dict[Cell, float]:
        found = {}
        wanted = {cell for cell in cells if cell.counts}
        for table in dict.fromkeys(cell.table for cell in cells):
            places = {(cell.row, cell.column) for cell in wanted if cell.table == table}
            values = self.predict(table, cluster, partial(_is_in, places))
            own = [cell for cell in self.cells if cell.table == table]
            for cell, value in zip(own, values, strict=True):
                if cell in wanted and value:
                    found[cell] = math.log(value / (cell.value or math.nan))
        return {cell: found[cell] for cell in cells if cell in found}

    def _cluster(self, at: numpy.ndarray) -> Cluster:
        cluster = self.known
        for name, value in zip(self.names, numpy.exp(at), strict=True):
            cluster = with_field(cluster, name, float(f"{value:.{DIGITS}g}"))
        return cluster


def _is_in(places: Collection[tuple[str, str]], row: str, column: str) -> bool:
    return (row, column) in places


def _check(cluster: Cluster, fields: Mapping[str, Field]) -> None:
    if len(fields) > MOST_FIELDS:
        raise UsageError(f"{cluster.name}: {len(fields)} fields to fit; give at most {MOST_FIELDS}")
    for path, (start, least, most) in fields.items():
        field_of(cluster, path)
        if not 0 < least <= start <= most:
            raise UsageError(f"{path}: starts at {start}; give 0 < least <= start <= most, not {least} and {most}")
        if path.endswith("TFLOP_s") and most > cluster.device.peak_TFLOP_s:
            peak = cluster.device.peak_TFLOP_s
            raise UsageError(f"{path}: at most {most}, above the peak of the device; give at most {peak:g}")
