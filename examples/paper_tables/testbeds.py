"""Fits every testbed again, in about ten minutes, and compares its preset: numbers of both must be equal within 1 %.

It writes the `left_out.csv` of each paper. Run examples/paper_tables/all.sh after it.

PYTHONPATH=. python -m examples.paper_tables.testbeds [TESTBED ...]
"""

import csv
import statistics
import sys
from collections.abc import Iterator

from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.fields import field_of
from megatron.context_parallel.cluster.search.calibrate import Calibration
from megatron.context_parallel.commands.calibrate import calibrate

from .cells import HERE, PAPERS
from .judged import BARS
from .predictions import predictor

EQUAL = 0.01
LEFT_OUT = ("column", "table", "testbed")


def testbeds() -> Iterator[tuple[str, str]]:
    """Papers whose testbed is fitted, and these testbeds."""
    for paper in PAPERS:
        for testbed in getattr(predictor(paper), "FIELDS", {}):
            yield paper, testbed


def fitted(paper: str, testbed: str) -> Calibration:
    return calibrate(HERE / paper, testbed, predictor(paper))  # type: ignore[arg-type]


def differences(fit: Calibration) -> dict[str, tuple[float, float]]:
    """Fields whose number in the preset is not that of the fit: both."""
    preset = load_cluster(fit.fitted.name)
    both = {name: (field_of(preset, name), field_of(fit.fitted, name)) for name in fit.names}
    return {name: (there, here) for name, (there, here) in both.items() if abs(there / here - 1) > EQUAL}


def write_left_out(paper: str, fit: Calibration) -> None:
    with (HERE / paper / "left_out.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("table", *(f"{what}_percent" for what in LEFT_OUT)))
        for table in dict.fromkeys(cell.table for cell in fit.cells if (paper, cell.table) in BARS):
            judged = fit.judge(table)
            errors = [getattr(judged, what) for what in LEFT_OUT]
            if all(errors):
                writer.writerow((table, *(f"{100 * statistics.median(of):.1f}" for of in errors)))


def main(wanted: list[str]) -> int:
    wrong = 0
    for paper, testbed in testbeds():
        if wanted and testbed not in wanted:
            continue
        fit = fitted(paper, testbed)
        write_left_out(paper, fit)
        differing = differences(fit)
        print(f"{testbed}: {len(fit.names)} fields, {len(differing)} differ from the preset", flush=True)
        for name, (there, here) in differing.items():
            print(f"  {name}: {there:g} in the preset, {here:g} fitted")
        wrong += len(differing)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
