"""Measures the cells of a table with this project's commands: here, or by a Slurm job for each row."""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.progress import tracked

from .cells import ROOT, Cell, Result, read_cells, results_file, text, write_results
from .commands import LAUNCHER
from .measured import measured
from .predictions import predicted, predictor
from .simulate import print_beside, publish
from .slurm import script_of, submit

SCALED = "scaled"  # of files: what was measured is not the paper's case


@dataclass(frozen=True)
class Job:
    """A command, and the cells that it measures.

    Attributes:
        folder: gets the command, its output and its results.
    """

    row: str
    command: tuple[str, ...]
    cells: tuple[Cell, ...]
    folder: Path

    @property
    def known(self) -> Path:
        """The file that says what ran."""
        return self.folder / "command.txt"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def words(self) -> list[str]:
        """The command with the folder of its results, where its program has a flag for it."""
        has_output = any("benchmarks/" in word for word in self.command)
        return [*self.command, *(["--output", str(self.folder)] if has_output else [])]

    @property
    def nodes(self) -> int:
        return int(self.flag("--nnodes")) if self.command[0] == LAUNCHER else 1

    def prepare(self) -> None:
        """Creates the folder again, without the results of an earlier run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.known.write_text(shlex.join(self.command) + "\n")

    def flag(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]


def measure_table(args: argparse.Namespace, others: Sequence[str]) -> None:
    """Shows the commands, runs them, submits them, or collects their results.

    Raises:
        UsageError: an unknown row or column, cells that no command measures, or a machine that cannot run them.
    """
    jobs = [*jobs_of(args, others)]
    if args.mode == "show":
        _show(args, others, jobs)
        return
    if args.mode == "slurm":
        submit(jobs, f"{args.paper}_{args.table}")
        return
    if args.mode == "run":
        _run(jobs)
    collect(args, others, jobs)


def jobs_of(args: argparse.Namespace, others: Sequence[str]) -> Iterator[Job]:
    """One for each row and command. Cells of a row with the same command share it."""
    cells = read_cells(args.paper, args.table)
    for name, given in (("row", args.row), ("column", args.column)):
        known = [*dict.fromkeys(getattr(cell, name) for cell in cells)]
        if given and given not in known:
            raise UsageError(f"--{name} {given}: {args.table} has {', '.join(known)}")
    chosen = [c for c in cells if args.row in (None, c.row) and args.column in (None, c.column)]
    command, found = predictor(args.paper).command, dict[tuple[str, str], list[Cell]]()
    for cell in chosen:
        if words := command(args.table, cell.row, cell.column):
            found.setdefault((cell.row, words), []).append(cell)
    if not found:
        raise UsageError(f"--mode {args.mode}: no command measures these cells of {args.paper} {args.table}")
    base = args.output.absolute() / "runs" / _name(args, others)
    counts = dict[str, int]()
    for (row, words), measures in found.items():
        counts[row] = counts.get(row, 0) + 1
        folder = base / re.sub(r"[^\w.-]+", "_", row) / str(counts[row])
        yield Job(row, tuple(changed(shlex.split(words), others)), tuple(measures), folder)


def changed(command: Sequence[str], others: Sequence[str]) -> list[str]:
    """A command whose flags have the values that `others` give; flags that it has not are added.

    Raises:
        UsageError: `others` begins with a value.
    """
    words, i = list(command), 0
    while i < len(others):
        flag = others[i]
        if not flag.startswith("--"):
            raise UsageError(f"-- {flag}: give flags and their values, such as -- --seq-length 1024")
        end = i + 1
        while end < len(others) and not others[end].startswith("--"):
            end += 1
        if flag in words:
            at = words.index(flag)
            words[at : at + end - i] = others[i:end]
        else:
            words += others[i:end]
        i = end
    return words


def _name(args: argparse.Namespace, others: Sequence[str]) -> str:
    return f"{args.paper}_{args.table}" + (f"_{SCALED}" if others else "")


def _show(args: argparse.Namespace, others: Sequence[str], jobs: Sequence[Job]) -> None:
    """Prints the script of each row, its nodes, and the prediction for each cell; of a smaller case there is none."""
    results = [] if others else predicted(args.paper, args.table, args.output)
    expected = {(of.row, of.column): of.predicted for of in results}
    for row in dict.fromkeys(job.row for job in jobs):
        of_row = [job for job in jobs if job.row == row]
        launched = all(job.command[0] == LAUNCHER for job in of_row)
        print(script_of(of_row, args.table) if launched else "\n".join(shlex.join(job.command) for job in of_row))
        nodes = max(job.nodes for job in of_row)
        print(f"{row}: {nodes} node{'s' if nodes > 1 else ''}")
        for cell in (cell for job in of_row for cell in job.cells):
            value = text(expected.get((cell.row, cell.column)))
            print(f"  {cell.column}: {f'expected {value} {cell.unit}' if value else 'no prediction'}")


def _run(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.nodes > 1:
            each = job.flag("--nproc-per-node")
            raise UsageError(
                f"--mode run: {job.row} needs {job.nodes} nodes of {each} ranks; give --mode slurm, or a smaller case "
                "after -- (such as -- --nnodes 1 --nproc-per-node 4 --seq-length 8192)"
            )
    for job in tracked(jobs, "measuring rows"):
        announce(f"measuring {job.row}")
        job.prepare()
        words = job.words
        start = [sys.executable, *(["-m", "torch.distributed.run", "--standalone"] if words[0] == LAUNCHER else [])]
        with job.log.open("w") as log:
            status = subprocess.run([*start, *words[1:]], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        print(f"{job.row}: {'measured' if status == 0 else f'FAILED, see {job.log}'}", flush=True)


def collect(args: argparse.Namespace, others: Sequence[str], jobs: Sequence[Job]) -> None:
    """Writes what the commands measured into the table's file; a smaller case gets a file of its own."""
    found, missing = dict[tuple[str, str], float](), list[str]()
    for job in jobs:
        if not job.known.exists() or job.known.read_text() != shlex.join(job.command) + "\n":
            missing.append(f"{job.row}: not measured yet: {shlex.join(job.command)}")
            continue
        for cell in job.cells:
            if (value := measured(cell, job.command, job.folder, job.log)) is not None:
                found[cell.row, cell.column] = value
            else:
                missing.append(f"{job.row}, {cell.column}: no result in {job.folder}")
    print("\n".join(missing))
    if not found:
        return
    if others:
        _write_scaled(args, others, found)
        return
    results = [
        replace(of, measured=found.get((of.row, of.column), of.measured))
        for of in predicted(args.paper, args.table, args.output)
    ]
    publish(results, args.paper, args.table, args.output)
    print_beside(results, args.paper, args.table)


def _write_scaled(args: argparse.Namespace, others: Sequence[str], found: dict[tuple[str, str], float]) -> None:
    """Writes only measured numbers: neither the paper nor the prediction has this case."""
    label = f"{args.table} with {shlex.join(others)}"
    cells = [c for c in read_cells(args.paper, args.table) if (c.row, c.column) in found]
    results = [Result(label, c.row, c.column, c.unit, "", None, found[c.row, c.column], False) for c in cells]
    path = results_file(args.paper, f"{args.table}_{SCALED}", args.output)
    write_results(results, path)
    for of in results:
        print(f"{label}: {of.row}, {of.column}: {of.measured:.5g} {of.unit}")
    print(f"wrote {path}: a smaller case than the paper's, with nothing beside it")
