"""Every kind of sharding trains as plain DDP does, and resumes from the checkpoint of every other.

python -m tests.campaigns.zero [--family llama|gpt3] [--bf16] [--strategy ring|mesh] [--from WAY] [--to WAY]
prints a line for each pair, on 4 ranks, context 2 x data 2. It fails if the relative difference of a loss or
gradient norm of 8 steps is more than 1e-6, or with --bf16 2e-3: there a difference of 1e-7 may decide how a weight
is rounded.
"""

import argparse
import sys
import tempfile

import torch

from tests.support import zero_case
from tests.support.ranks import Ranks

STOP, END = 4, 8


def difference(got: list, expected: list) -> float:
    """The largest relative difference of losses and gradient norms, over all ranks."""
    worst = 0.0
    for run in got:
        for mine, plain in zip(run, expected, strict=True):
            worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(mine, plain, strict=True)))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--strategy", default="ring", choices=("ring", "mesh"))
    parser.add_argument("--from", dest="first", choices=zero_case.WAYS)
    parser.add_argument("--to", dest="then", choices=zero_case.WAYS)
    args = parser.parse_args()
    how = zero_case.MESH if args.strategy == "mesh" else {}
    how |= {"train_iters": END} | ({"bf16": True, "params_dtype": torch.bfloat16} if args.bf16 else {})
    bound = 2e-3 if args.bf16 else 1e-6
    ranks, worst = Ranks(4), 0.0
    try:
        plain = ranks(4, zero_case.train, args.family, zero_case.PLAIN | how)[0]
        for first in [args.first] if args.first else zero_case.WAYS:
            with tempfile.TemporaryDirectory() as folder:
                before = zero_case.WAYS[first] | how | {"save": folder, "exit_interval": STOP}
                got = ranks(4, zero_case.train, args.family, before)
                off = difference(got, [values[:STOP] for values in plain])
                print(f"{first}: {off:.1e}", flush=True)
                worst = max(worst, off)
                for then in [args.then] if args.then else zero_case.WAYS:
                    got = ranks(4, zero_case.train, args.family, zero_case.WAYS[then] | how | {"load": folder})
                    off = difference(got, [values[STOP:] for values in plain])
                    print(f"{first} -> {then}: {off:.1e}", flush=True)
                    worst = max(worst, off)
            ranks.close()  # some groups stay until their ranks end
            ranks = Ranks(4)
    finally:
        ranks.close()
    print(f"worst {worst:.1e}, allowed {bound:.0e}")
    return int(worst > bound)


if __name__ == "__main__":
    sys.exit(main())
