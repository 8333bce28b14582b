"""Prints how many received partials a rank has at once when it merges them, for all strategies, in this process.

PYTHONPATH=. python benchmarks/merges.py --ranks 8
"""

import argparse
from collections import Counter
from unittest.mock import patch

import torch

from megatron.context_parallel import STRATEGIES, AllRanks, context_parallel_attention
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.plan.ir import PARTIAL, Key
from megatron.context_parallel.runtime.executor import Executor

KEPT = 8  # bytes read and written of the rank's own partial in a merge, for each number
READ = 4  # bytes read of the received partial


def count(spec: str, n: int) -> Counter[int]:
    """How many times a rank merges 1, 2, 3, ... partials that it has at once, in both passes of all ranks."""
    found: Counter[int] = Counter()
    arrive, settle = Executor._wait_for, Executor._merge_arrived

    def noted_arrival(self: Executor, key: Key):
        if key[0] in PARTIAL:
            found[len(self.arriving[key])] += 1
        yield from arrive(self, key)

    def noted_settling(self: Executor, done):
        for key, waiting in self.arriving.items():
            complete = sum(work is done for work, _, _ in waiting)
            if key[0] in PARTIAL and complete:
                found[complete] += 1
        settle(self, done)

    cp = AllRanks(n, spec)
    q = torch.randn(2 * n, 1, n, 8, requires_grad=True)
    with patch.multiple(Executor, _wait_for=noted_arrival, _merge_arrived=noted_settling):
        context_parallel_attention(q, q, q, cp).sum().backward()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    print("| strategy | 1 at once | 2 | 3 | 4 or more | bytes of a number, one at a time | four at once |")
    print("|---|---|---|---|---|---|---|")
    for name, strategy in STRATEGIES.items():
        spec = name if strategy.head_parallel == "optional" else f"{name}:head_parallel_size=2"
        specs = {"attention2d": [spec, f"{spec}:overlap=no"]}.get(name, [spec])
        for text in [] if name == "ulysses" else specs:
            found = count(text, args.ranks)
            partials = sum(times * merged for merged, times in found.items())
            passes = sum(-(-merged // 4) * times for merged, times in found.items())
            few = [str(found[merged]) for merged in (1, 2, 3)]
            more = sum(times for merged, times in found.items() if merged > 3)
            now, then = KEPT + READ, (KEPT * passes + READ * partials) / max(1, partials)
            print(f"| `{text}` | {' | '.join(few)} | {more} | {now} | {then:.1f} |", flush=True)


if __name__ == "__main__":
    run_main(main)
