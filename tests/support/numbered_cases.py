"""Campaigns that draw a case for each number until their time is over: their flags, and the numbers."""

import argparse
import time
from collections.abc import Iterator
from random import Random


def read_flags(description: str, case: str) -> argparse.Namespace:
    """`seconds`, `seed` and `only` of the command line; `case` is what is drawn, such as "session"."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--only", type=int, help=f"only the {case} of this number")
    return parser.parse_args()


def numbered(args: argparse.Namespace) -> Iterator[tuple[str, Random]]:
    """For each case the flags that run it again, and its own random numbers."""
    until, number = time.monotonic() + args.seconds, args.only or 0
    while time.monotonic() < until:
        yield f"--seed {args.seed} --only {number}", Random(f"{args.seed} {number}")
        if args.only is not None:
            return
        number += 1
