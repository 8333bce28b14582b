"""Five steps of training on 4 context-parallel ranks through each framework, against one rank; a table of differences.

python -m tests.campaigns.doors [--door DOOR]
prints for each door and strategy the largest absolute difference of the mean losses, over all steps and ranks. It
fails above 1e-6.
"""

import argparse
import sys
from functools import partial

from megatron.context_parallel.strategies import STRATEGIES
from tests.support import megatron_lm_case, torch_case, training_case, transformers_case
from tests.support.gpt_case import batch
from tests.support.ranks import Ranks

RANKS, STEPS, BOUND = 4, 5, 1e-6
SPECS = ("ring", "mesh", "lightseq", "ulysses")


def trainer(spec: str | None) -> list[float]:
    """Without a strategy: on one rank, which is the reference for each framework."""
    how: dict = {"context_parallel_size": RANKS, "cp_strategy": spec} if spec else {}
    layout = STRATEGIES[spec or "ring"].layouts[0]
    return training_case.train("llama", train_iters=STEPS, cp_layout=layout, **how).losses


def megatron_lm(spec: str | None) -> list[float]:
    total = batch()["weight"].sum().item()
    return [loss / total for loss in megatron_lm_case.train([spec] if spec else [], steps=STEPS)]


def transformers(spec: str | None) -> list[float]:
    return transformers_case.train("llama", spec, steps=STEPS)


def accelerate(spec: str | None) -> list[float]:
    return transformers_case.accelerated("llama", spec, steps=STEPS) if spec else transformers(spec)


def fsdp2(spec: str | None, **how: bool) -> list[float]:
    return torch_case.train(spec or "ring", **how)


DOORS = {
    "this project's trainer": trainer,
    "Megatron-LM's functions": megatron_lm,
    "transformers": transformers,
    "accelerate, FSDP2": accelerate,
    "FSDP2": fsdp2,
    "FSDP2, compiled": partial(fsdp2, compiled=True),
}


def difference(ranks: Ranks, door: str, spec: str) -> float:
    (expected,) = ranks(1, DOORS[door], None)
    runs = ranks(RANKS, DOORS[door], spec)
    assert len(expected) == STEPS
    return max(abs(a - b) for run in runs for a, b in zip(run, expected, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--door", choices=DOORS)
    args = parser.parse_args()
    ranks, worst = Ranks(RANKS), 0.0
    print(f"| | {' | '.join(SPECS)} |\n|---|{'---|' * len(SPECS)}", flush=True)
    try:
        for door in [args.door] if args.door else DOORS:
            found = [difference(ranks, door, spec) for spec in SPECS]
            print(f"| {door} | {' | '.join(f'{x:.1e}' for x in found)} |", flush=True)
            worst = max(worst, *found)
    finally:
        ranks.close()
    print(f"worst {worst:.1e}, allowed {BOUND:.0e}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
