"""The campaign: which faults are injected, how many, and the table of what came of them."""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from . import damage, live
from .bench import LAYOUTS, Bench
from .job import warm
from .verdict import DETECTED, LOST, NAMED, WITHIN, Case, Injection

KINDS: dict[Injection, int] = {  # how many of 60
    live.kill: 9,
    live.kill_in_save: 2,
    live.kill_beside_save: 2,
    live.stop: 6,
    live.cut_off: 6,
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
    live.terminate,
)
COLUMNS = (DETECTED, NAMED, WITHIN, LOST)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    warm()
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    bench, began, cases = Bench(directory), time.monotonic(), []
    numbers = args.only if args.only else range(args.count)
    for number in numbers:
        kind, case = draw(bench, args.seed, number, args.kind)
        since = time.monotonic()
        try:
            kind(case)
        except Exception:
            case.expect(DETECTED, False, traceback.format_exc())
        cases.append((kind, case))
        print(_told(kind, case, time.monotonic() - since, args), flush=True)
        if not args.keep:
            bench.forget()
    print(table(cases))
    print(f"{len(cases)} injections with seed {args.seed} in {time.monotonic() - began:.0f} s")
    if args.keep:
        print(f"all runs are kept in {directory}")
    else:
        shutil.rmtree(directory)
    return int(any(case.wrong for _, case in cases))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=60, help="injections; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; default: %(default)s")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these of the seed's injections alone")
    parser.add_argument("--kind", choices=[kind.__name__ for kind in KINDS], help="faults of this kind alone")
    parser.add_argument("--keep", action="store_true", help="leave the directories of all runs")
    return parser.parse_args(argv)


def draw(bench: Bench, seed: int, number: int, name: str | None = None) -> tuple[Injection, Case]:
    """Injection `number` of a seed: every 60 have each kind as often as `KINDS` says."""
    order = [kind for kind, count in KINDS.items() for _ in range(count)]
    Random(f"{seed} {number // len(order)}").shuffle(order)
    kind = next((kind for kind in KINDS if kind.__name__ == name), order[number % len(order)])
    random = Random(f"{seed} {number}")
    return kind, Case(number, bench, random.choice(list(LAYOUTS)), random)


def _told(kind: Injection, case: Case, seconds: float, args: argparse.Namespace) -> str:
    came = (
        "as promised"
        if case.injected and not case.wrong
        else "not injected"
        if not case.injected
        else "NOT AS PROMISED"
    )
    lines = [f"{case.number:4d} {kind.__name__:18} {came:16} {seconds:5.1f} s  {case.what}"]
    lines += [f"     {what}: {instead}" for what, instead in case.wrong]
    if case.wrong:
        only = f"--kind {args.kind} " if args.kind else ""
        lines.append(f"     python -m tests.faults --seed {args.seed} {only}--only {case.number} --keep")
    return "\n".join(lines)


def table(cases: list[tuple[Injection, Case]]) -> str:
    """By kind: how many were injected, and of those how many were detected, named, in time, and lost something."""
    rows: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in KINDS}
    rows["all"] = Counter()
    rows["kill, stop, cut off"] = Counter()
    for kind, case in cases:
        broken = {what for what, _ in case.wrong}
        groups = [kind.__name__, "all", *(["kill, stop, cut off"] if kind in LIVE else [])]
        for group in groups:
            rows[group]["injected"] += case.injected
            for what in COLUMNS if case.injected else ():
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
