"""Writes the predictions for a table: a CSV file, a picture, and the table beside the paper's."""

import argparse
from pathlib import Path

from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.errors import UsageError

from .cells import PAPERS, Result, read_cells, results_file, write_results
from .drawing import draw, side_by_side
from .predictions import predicted

COLUMNS = 80  # of a printed table


def name_of(paper: str, table: str) -> str:
    """As in "LoongTrain, Table 4"."""
    return f"{PAPERS[paper]}, {table_name(table)}"


def table_name(table: str) -> str:
    """As in "Table 4"."""
    return table.replace("_", " ").capitalize()


def simulate_table(args: argparse.Namespace, others: list[str]) -> None:
    """Raises UsageError for flags that choose cells to measure."""
    if others or args.row or args.column:
        raise UsageError(
            f"{'-- ' + ' '.join(others) if others else '--row, --column'}: give it with --mode run or slurm"
        )
    read_cells(args.paper, args.table)  # refuses an unknown paper or table before anything is computed
    announce(f"predicting {name_of(args.paper, args.table)}")
    results = predicted(args.paper, args.table, args.output)
    publish(results, args.paper, args.table, args.output)
    print_beside(results, args.paper, args.table)


def publish(results: list[Result], paper: str, table: str, folder: Path) -> None:
    path = results_file(paper, table, folder)
    write_results(results, path)
    title = f"{name_of(paper, table)}: predicted against the paper"
    draw({table_name(table): results}, title, path.with_suffix(".png"))


def print_beside(results: list[Result], paper: str, table: str) -> None:
    units = ", ".join(dict.fromkeys(result.unit for result in results))
    what = "paper | predicted" + (" | measured" if any(r.measured is not None for r in results) else "")
    show(*side_by_side(results, f"{name_of(paper, table)}: {what}; {units}"), width=COLUMNS)
