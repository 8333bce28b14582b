"""Fits a cluster's description to published or measured numbers, and reports how well it predicts other numbers.

DIR contains the numbers, NAME.csv with the columns row, column, unit and paper, and a predict.py with

    CLUSTER     {NAME: preset} of each table
    FIELDS      {preset: {field: (start, least, most)}}, such as {"nics.GB_s": (25, 10, 25)}
    FITTED      {NAME: (row, column) -> whether the fit may use the cell}
    predict     (NAME, cluster, wanted) -> a number or None for each cell; wanted(row, column) may be heeded for speed

With --trace it reads rates of the device off profiles of training steps instead, and puts them into the description.
With --prefill-times it fits the constants of --cp-prefill empirical to measured passes instead.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.calibrate()

import csv
import importlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.errors import UsageError

if TYPE_CHECKING:
    from megatron.context_parallel.cluster.search.calibrate import Calibration, Cell
    from megatron.context_parallel.inference.choose import MeasuredPrefill

FITTED_TO = " Fitted by tools/calibrate.py"


class CalibrateFlags(FlagSection):
    folder: Path = flag(
        "folder of the numbers and predict.py",
        option="DIR",
        example="examples/paper_tables/loongtrain",
        excludes="prefill_times trace",
    )
    cluster: str = flag(
        "description to change: a preset, with --trace also a .yaml file",
        unit="NAME",
        example="loongtrain",
        excludes="prefill_times",
    )
    output: Path = flag("YAML file to write", endings=(".yaml", ".yml"), excludes="prefill_times")
    trace: list[Path] | None = flag(
        "traces of torch.profiler with record_shapes: read the rates of attention and products off them",
        unit="FILE",
        excludes="prefill_times",
        example="runs/profiled/rank0.pt.trace.json",
    )
    prefill_times: Path | None = flag(
        "passes.csv of benchmarks/inference.py on some ranks: times of pass-kv and pass-q", example="passes.csv"
    )


PARSER = FlagParser(
    CalibrateFlags,
    __doc__,
    "DIR --cluster NAME --output FILE",
    [
        "examples/paper_tables/loongtrain --cluster loongtrain --output fitted.yaml",
        "examples/paper_tables/mesh_attention --cluster mesh-attention --output fitted.yaml",
        "--trace runs/profiled/rank0.pt.trace.json --cluster dgx-h100 --output here.yaml",
        "--prefill-times runs/inference/passes.csv",
    ],
)


def main(argv: list[str] | None = None) -> None:
    args = PARSER.parse(argv)
    if args.prefill_times:
        _fit_prefill(args.prefill_times)
        return
    if args.trace:
        _read_traces(args.trace, args.cluster, args.output)
        return
    if not (args.folder / "predict.py").is_file():
        raise UsageError(f"DIR {args.folder}: no predict.py; give a folder such as examples/paper_tables/loongtrain")
    paper = _module(args.folder)
    if args.cluster not in paper.FIELDS:
        raise UsageError(f"--cluster {args.cluster}: not in its FIELDS; give one of {', '.join(paper.FIELDS)}")
    announce(f"fitting {args.cluster} to the cells of {args.folder}")

    from megatron.context_parallel.cluster.description import save_cluster

    fit = calibrate(args.folder, args.cluster, paper)
    cells = fit.cells
    known = fit.fitted.source.split(FITTED_TO)[0]
    save_cluster(
        replace(fit.fitted, source=known + f"{FITTED_TO} to {_said(cells)}: {', '.join(fit.names)}."), args.output
    )
    _show(fit)
    print(f"wrote {args.output}")


def _read_traces(paths: list[Path], name: str, output: Path) -> None:
    """Writes the description with the rates in traces."""
    from megatron.context_parallel.cluster.description import load_cluster, save_cluster
    from megatron.context_parallel.cluster.measure.trace_rates import read_rates

    cluster = load_cluster(name)
    found = read_rates(paths)
    kinds = f"{len(found.attention)} kinds of attention calls, {len(found.gemm)} sizes of products"
    source = f"{cluster.source}. Read off traces of {len(paths)} ranks: {kinds}."
    save_cluster(replace(cluster, source=source, device=found.of(cluster.device)), output)
    print(f"read {kinds}, {found.calls} calls\nwrote {output}")


def calibrate(folder: Path, preset: str, paper: ModuleType) -> "Calibration":
    """Fits a preset to the numbers in a folder; `paper` is the module of its predict.py."""
    from megatron.context_parallel.cluster.description import load_cluster
    from megatron.context_parallel.cluster.search.calibrate import Calibration, Field

    fields = {path: Field(*given) for path, given in paper.FIELDS[preset].items()}
    return Calibration(load_cluster(preset), fields, read_cells(folder, preset, paper), paper.predict)


def _fit_prefill(path: Path) -> None:
    """Print the constants that best fit the measured prefills in `path`, and what their choices cost there."""
    from megatron.context_parallel.inference.choose import empirical_loss, fit_empirical

    measured = read_prefills(path)
    constants = fit_empirical(measured)
    losses = [empirical_loss(one, constants) for one in measured]
    right = losses.count(0)
    print(f"{right} of {len(measured)} prefills take the faster variant; the others cost {max(losses):.1%} at most")
    totals = {one.new + one.cached for one in measured}
    if len(totals) == 1:
        print(f"all have {min(totals)} tokens, new and cached: the constants hold for so many only")
    print("--cp-prefill empirical --cp-prefill-constants", *(f"{number:.6g}" for number in constants))


def read_prefills(path: Path) -> "list[MeasuredPrefill]":
    """The prefills in the file of benchmarks/inference.py for which both variants were measured.

    Raises:
        UsageError: the file cannot be read, lacks a column, or has passes of several numbers of ranks.
    """
    from megatron.context_parallel.inference.choose import PASS_KV, PASS_Q, MeasuredPrefill

    times: dict[tuple[int, int], dict[str, float]] = {}
    ranks = set()
    try:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                if line["choice"] in (PASS_KV, PASS_Q):
                    batch = int(line["batch"])
                    tokens = batch * int(line["new"]), batch * int(line["cached"])
                    times.setdefault(tokens, {})[line["choice"]] = float(line["milliseconds"])
                    ranks.add(line["ranks"])
    except (OSError, ValueError, KeyError) as error:
        why = f"cannot be read ({type(error).__name__}: {error})"
        raise UsageError(f"--prefill-times {path}: {why}; give the passes.csv of benchmarks/inference.py") from None
    if len(ranks) > 1:
        why = f"has passes of {', '.join(sorted(ranks))} ranks, which need constants of their own"
        raise UsageError(f"--prefill-times {path}: {why}; give a file of one number of ranks")
    both = {tokens: seconds for tokens, seconds in times.items() if len(seconds) == 2}
    return [MeasuredPrefill(*tokens, seconds[PASS_KV], seconds[PASS_Q]) for tokens, seconds in both.items()]


def _module(folder: Path) -> ModuleType:
    """The folder's predict.py, imported as a module below the working directory."""
    try:
        parts = folder.absolute().resolve().relative_to(Path.cwd().resolve()).parts
    except ValueError:
        raise UsageError(f"DIR {folder}: not below the working directory; run this where its package is") from None
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(".".join((*parts, "predict")))


def read_cells(folder: Path, preset: str, paper: ModuleType) -> "list[Cell]":
    """The cells of all tables of a testbed, table by table, each in the order of its file."""
    from megatron.context_parallel.cluster.search.calibrate import Cell

    cells = []
    for table in (table for table, name in paper.CLUSTER.items() if name == preset):
        used = paper.FITTED.get(table, lambda row, column: False)
        with (folder / f"{table}.csv").open(newline="") as file:
            for line in csv.DictReader(file):
                value = float(line["paper"]) if line["paper"] else None
                place = line["row"], line["column"]
                cells.append(Cell(table, *place, value, bool(value) and used(*place)))
    return cells


def _said(cells: "Sequence[Cell]") -> str:
    """The cells that were used: rows of tables, and their columns if not all cells of these rows were used."""
    tables = []
    for table in dict.fromkeys(cell.table for cell in cells if cell.fitted):
        used = [cell for cell in cells if cell.table == table and cell.fitted]
        rows = list(dict.fromkeys(cell.row for cell in used))
        said = f"{table} ({'; '.join(rows)}"
        if any(cell.table == table and cell.row in rows and cell.counts and not cell.fitted for cell in cells):
            said += f": {'; '.join(dict.fromkeys(cell.column for cell in used))}"
        tables.append(said + ")")
    return " and ".join(tables)


def _show(fit: "Calibration") -> None:
    """Fields, and the errors of each table: also where a column or the table is left out, or nothing is fitted."""
    from rich.table import Table

    from megatron.context_parallel.cli.tables import show
    from megatron.context_parallel.cluster.fields import field_of

    fields = Table("field", "start", "fitted", "least", "most", title=f"{fit.fitted.name}: {fit.steps} steps")
    for name, (start, least, most) in zip(fit.names, fit.fields, strict=True):
        fields.add_row(name, *(f"{value:g}" for value in (start, field_of(fit.fitted, name), least, most)))
    kinds = "fitted cells", "other cells", "column left out", "table left out", "nothing fitted"
    errors = Table("table", *kinds, title="median / worst error (cells)")
    for table in dict.fromkeys(cell.table for cell in fit.cells):
        errors.add_row(table, *map(_median, fit.judge(table)))
    show(fields, errors)


def _median(errors: list[float]) -> str:
    return f"{statistics.median(errors):.1%} / {max(errors):.1%} ({len(errors)})" if errors else "-"
