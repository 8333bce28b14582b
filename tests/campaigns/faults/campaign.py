"""The campaign: which faults are injected, how often, and the table of their outcomes."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from . import damage, live
from .bench import LAYOUTS, Bench
from .job import adopt_orphans, warm
from .verdict import DETECTED, LOST, NAMED, WITHIN, Case, Injection

KINDS: dict[Injection, int] = {  # how many of 72
    live.kill: 9,
    live.kill_in_save: 2,
    live.kill_beside_save: 2,
    live.stop: 6,
    live.cut_off: 6,
    live.go_silent: 4,
    live.end_while_joining: 5,
    live.join_late: 1,
    live.drop_watch: 2,
    live.terminate: 2,
    live.kill_launcher: 2,
    live.kill_helper: 1,
    live.fail: 3,
    live.interrupt: 2,
    live.leave_at_sigterm: 2,
    live.nan_gradient: 2,
    live.bad_token: 2,
    live.disk_full: 2,
    live.directory_gone: 1,
    live.read_only: 1,
    live.second_job: 1,
    damage.checkpoint_file: 4,
    damage.tracker: 1,
    damage.leftovers: 1,
    damage.data_file: 3,
    damage.token_in_file: 1,
    damage.other_flags: 2,
    damage.other_layout: 1,
    damage.other_rate: 1,
}
LIVE = (
    live.kill,
    live.kill_in_save,
    live.kill_beside_save,
    live.stop,
    live.cut_off,
    live.go_silent,
    live.end_while_joining,
    live.terminate,
)
COLUMNS = (DETECTED, NAMED, WITHIN, LOST)


@dataclass
class Result:
    """The outcome of one injection."""

    seed: int
    number: int
    kind: str
    what: str
    injected: bool
    wrong: list[tuple[str, str]]  # (which expectation, what happened instead)
    seconds: float
    commit: str


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    warm()
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    file = args.results or directory / "results.jsonl"
    file.touch()
    wanted = {number: draw_kind(args, number) for number in args.only or range(args.count)}
    before, began = _done(file, args.seed, wanted), time.monotonic()
    _share_out([number for number in wanted if number not in before], args, file, directory)
    results = _done(file, args.seed, wanted)
    print(table([*results.values()]))
    took = f"{len(results) - len(before)} of them now, in {time.monotonic() - began:.0f} s"
    print(f"{len(results)} injections with seed {args.seed}, {took}")
    if args.keep:
        print(f"all runs are kept in {directory}")
    else:
        shutil.rmtree(directory)
    return int(len(results) < len(wanted) or any(result.wrong for result in results.values()))


def _done(file: Path, seed: int, wanted: dict[int, Injection]) -> dict[int, Result]:
    """The results that the file already has, by the number of the injection."""
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
    return {
        result.number: result
        for result in results
        if result.seed == seed and result.number in wanted and result.kind == wanted[result.number].__name__
    }


def _share_out(numbers: list[int], args: argparse.Namespace, file: Path, directory: Path) -> None:
    """Make the injections in `--processes` processes, each of which takes the next number when it is free."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    workers = []
    for worker in range(args.processes):
        if not (child := os.fork()):
            os.close(writer)
            with suppress(KeyboardInterrupt):
                _work(reader, args, file, directory / str(worker))
            os._exit(0)
        workers.append(child)
    os.close(reader)
    with suppress(BrokenPipeError):  # all workers died
        for number in numbers:
            os.write(writer, number.to_bytes(4))
    os.close(writer)
    for child in workers:
        os.waitpid(child, 0)


def _work(reader: int, args: argparse.Namespace, file: Path, directory: Path) -> None:
    adopt_orphans()
    directory.mkdir()
    bench = Bench(directory)
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    while taken := os.read(reader, 4):
        number = int.from_bytes(taken)
        kind = draw_kind(args, number)
        random = Random(f"{args.seed} {number}")
        case = Case(number, bench, random.choice(list(LAYOUTS)), random)
        since = time.monotonic()
        try:
            kind(case)
        except Exception:
            case.expect(DETECTED, False, traceback.format_exc())
        seconds = round(time.monotonic() - since, 1)
        result = Result(args.seed, number, kind.__name__, case.what, case.injected, case.wrong, seconds, commit)
        with file.open("a") as results:
            results.write(json.dumps(asdict(result)) + "\n")  # in one piece: other processes write there too
        print(_told(result, args), flush=True)
        if not args.keep:
            bench.forget()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=60, help="injections; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="random seed; default: %(default)s")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these of the seed's injections alone")
    parser.add_argument("--results", type=Path, help="gets a line for each injection; those in it are not made again")
    parser.add_argument("--processes", type=int, default=1, help="so many injections at once; default: %(default)s")
    parser.add_argument("--kind", choices=[kind.__name__ for kind in KINDS], help="faults of this kind alone")
    parser.add_argument("--keep", action="store_true", help="leave the directories of all runs")
    return parser.parse_args(argv)


def draw_kind(args: argparse.Namespace, number: int) -> Injection:
    """The kind of injection `number` of a seed: every len(order) have each kind as often as `KINDS` says."""
    order = [kind for kind, count in KINDS.items() for _ in range(count)]
    Random(f"{args.seed} {number // len(order)}").shuffle(order)
    return next((kind for kind in KINDS if kind.__name__ == args.kind), order[number % len(order)])


def _told(result: Result, args: argparse.Namespace) -> str:
    came = "NOT AS PROMISED" if result.wrong else "as promised" if result.injected else "not injected"
    lines = [f"{result.number:4d} {result.kind:18} {came:16} {result.seconds:5.1f} s  {result.what}"]
    lines += [f"     {what}: {instead}" for what, instead in result.wrong]
    if result.wrong:
        only = f"--kind {args.kind} " if args.kind else ""
        lines.append(f"     python -m tests.campaigns.faults --seed {args.seed} {only}--only {result.number} --keep")
    return "\n".join(lines)


def table(results: list[Result]) -> str:
    """By kind: how many were injected, and of those how many were detected, named, in time, and lost something."""
    rows: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in KINDS}
    rows["all"] = Counter()
    rows["kill, stop, cut off"] = Counter()
    of_ranks = {kind.__name__ for kind in LIVE}
    for result in results:
        broken = {what for what, _ in result.wrong}
        for group in (result.kind, "all", *(["kill, stop, cut off"] if result.kind in of_ranks else [])):
            rows[group]["injected"] += result.injected
            for what in COLUMNS if result.injected else ():
                rows[group][what] += (what in broken) if what == LOST else what not in broken
    lines = [
        f"{'fault':22}" + "".join(f"{column:>10}" for column in ("injected", "detected", "named", "within", "lost"))
    ]
    for name, row in rows.items():
        if row["injected"]:
            numbers = (row["injected"], *(row[what] for what in COLUMNS))
            lines.append(f"{name.replace('_', ' '):22}" + "".join(f"{number:10}" for number in numbers))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
