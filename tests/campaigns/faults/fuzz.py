"""Fuzz of command lines and files.

    python -m tests.campaigns.faults.fuzz --flags 10000 --files 2000 --runs 50 --seed 0

Each is accepted, or refused with one line for each error, without a traceback or a hang. Some of the accepted command
lines are run and compared with one rank. The exit status is 1 if anything else happens.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from .bench import Bench, write_data
from .fuzz_files import Files
from .fuzz_flags import Found, check_flags
from .fuzz_runs import compare, pick
from .job import warm


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    warm()
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    bench = Bench(directory)
    failures = [*_files(bench, args), *_flags(bench, args)]
    print("\n".join(failures) or "nothing failed")
    if failures:
        print(f"the files are in {directory}")
    else:
        shutil.rmtree(directory)
    return int(bool(failures))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--flags", type=int, default=1000, help="command lines to check; default: %(default)s")
    parser.add_argument("--files", type=int, default=100, help="files to damage; default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="accepted command lines to run; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser.parse_args(argv)


def _files(bench: Bench, args: argparse.Namespace) -> list[str]:
    began, files = time.monotonic(), Files(bench)
    failures = [wrong for number in range(args.files) if (wrong := files.try_one(number, args.seed))]
    print(f"{args.files} damaged files in {time.monotonic() - began:.0f} s")
    for kind in files.kinds:
        counts = ", ".join(f"{files.came[kind, came]} {came}" for came in ("refused", "accepted", "failed"))
        print(f"  {kind:12} {counts}")
    return failures


def _flags(bench: Bench, args: argparse.Namespace) -> list[str]:
    began, failures = time.monotonic(), []
    data = bench.directory / "any" / "corpus"  # token 256 is in every vocabulary: more command lines are accepted
    data.parent.mkdir()
    write_data(data)
    found = Found()
    try:
        check_flags(args.flags, args.seed, data, found)
    except BaseException:
        failures.append(traceback.format_exc())
    refused, accepted = found.refused, len(found.accepted)
    came = f"{refused} refused, {accepted} accepted"
    print(f"{refused + accepted} command lines in {time.monotonic() - began:.0f} s: {came}")
    lines, began = pick(found, args.runs, args.seed, data), time.monotonic()
    for words, ranks, parsed in lines:
        if wrong := compare(bench, (words, ranks, parsed)):
            failures.append(f"WORLD_SIZE={ranks} pretrain_gpt.py {shlex.join(words)}\n    {wrong}")
    print(f"{len(lines)} of them run on 2 to 4 ranks and on one in {time.monotonic() - began:.0f} s")
    return failures


if __name__ == "__main__":
    sys.exit(main())
