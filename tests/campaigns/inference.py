"""Inference in every combination: attention of all stages, plans for up to 64 ranks, and tokens of long conversations.

    python -m tests.campaigns.inference
    python -m tests.campaigns.inference --only "tokens of 3 ranks"

Prints the largest error and all failures. The exit status is 1 if there is a failure.
"""

import argparse
import sys
import tempfile
from functools import partial
from itertools import product
from random import Random

import torch

from megatron.context_parallel import AllRanks
from megatron.context_parallel.inference.pages import PageTables
from megatron.context_parallel.plan.verify import verify
from tests.support import trained_case
from tests.support.ranks import Ranks
from tests.support.rows_case import VARIANTS, Batch, error

EXACT = 2e-6
RANKS = (1, 2, 3, 4, 8)
HEADS = ((4, 4), (4, 2), (4, 1))  # MHA, GQA, MQA
WINDOWS = (-1, 5)
STAGES = ("full prefill", "partial prefill", "decode", "mixed")


def tokens_of(stage: str, n: int, batch: int, draw: Random) -> list[tuple[int, int]]:
    """New and cached tokens of each sequence: single ones, fewer than 2n, and more."""
    counts = [1, 2 * n - 1, 2 * n + 1, 40]
    new = [1 if stage == "decode" else draw.choice(counts) for _ in range(batch)]
    cached = [0 if stage == "full prefill" else draw.choice([1, *counts]) for _ in range(batch)]
    if stage == "mixed":
        new = [draw.choice((1, count)) for count in new]
        cached = [draw.choice((0, count)) for count in cached]
    return list(zip(new, cached, strict=True))


def dealt(tokens: list[tuple[int, int]], n: int, window: int) -> Batch:
    """A batch whose rows are distributed by page tables, with cached rows before new ones."""
    tables, rank_of = PageTables(n, 4000, 4), []
    numbers = [tables.open() for _ in tokens]
    for which in (1, 0):
        if new := {number: of[which] for number, of in zip(numbers, tokens, strict=True) if of[which]}:
            tables.add(new)
    for number in numbers:
        of = torch.zeros(tables.length(number), dtype=torch.int64)
        for rank in range(n):
            of[torch.from_numpy(tables.positions(number, rank))] = rank
        rank_of.append(of)
    return Batch([sum(of) for of in tokens], [new for new, _ in tokens], torch.cat(rank_of), n, window)


def check_attention() -> list[str]:
    """Each stage, variant, number of ranks, batch, kind of heads and window."""
    failed, worst, cases = list[str](), 0.0, 0
    groups = {(n, v): AllRanks(n, spec(n)) for n in RANKS for v, spec in VARIANTS.items()}
    for case in product(STAGES, RANKS, (1, 3, 8), HEADS, WINDOWS):
        stage, n, batch, heads, window = case
        batch_of = dealt(tokens_of(stage, n, batch, Random(str(case))), n, window)
        for variant in VARIANTS:
            off = error(batch_of, groups[n, variant], *heads)
            worst, cases = max(worst, off), cases + 1
            if not off < EXACT:
                failed.append(f"attention: {variant} {case}: {off:.1e}")
    print(f"attention: {cases} cases, largest error {worst:.2e} of {EXACT:.0e}", flush=True)
    return failed


def check_plans() -> list[str]:
    """Each plan of a pass, verified up to 64 ranks."""
    for n in range(1, 65):
        for spec in VARIANTS.values():
            verify(AllRanks(n, spec(n)).plans.full(4, 2))
    print(f"plans: {len(VARIANTS)} of 1 to 64 ranks verified", flush=True)
    return []


HOW = [
    {"prefill": "pass-kv"},
    {"prefill": "pass-q"},
    {"prefill": "pass-q-all-to-all"},
    *({"chunk": chunk, "variants": ("pass-kv", "pass-q", "auto")} for chunk in (1, 3, 16, 64)),
]


def check_tokens(n: int) -> list[str]:
    """Conversations of three turns of 64 tokens with a trained model, in each way, alone and beside others."""
    ranks = Ranks(n)
    with tempfile.TemporaryDirectory() as folder:
        ranks(1, trained_case.train, folder)
        (expected,) = ranks(1, trained_case.from_the_start, folder)
        found = ranks(n, trained_case.over_the_cache, folder, HOW)
        apart = max(ranks(n, trained_case.among_others, folder))
    ranks.close()
    lengths = ", ".join(str(len(text)) for text in expected)
    print(f"tokens of {n} ranks: {len(HOW)} ways, {lengths} tokens; among others {apart:.1e} apart", flush=True)
    failed = [] if apart < 1e-5 else [f"tokens of {n} ranks: {apart:.1e} apart among others"]
    return failed + [
        f"tokens of {n} ranks: {how}"
        for of_rank in found
        for how, texts in zip(HOW, of_rank, strict=True)
        if texts != expected
    ]


CHECKS = {
    "attention": check_attention,
    "plans": check_plans,
    **{f"tokens of {n} ranks": partial(check_tokens, n) for n in RANKS},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", choices=CHECKS, help="default: all")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    failed = [line for name, check in CHECKS.items() if only in (None, name) for line in check()]
    print("\n".join(failed) or "all right")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
