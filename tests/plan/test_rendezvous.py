"""All shipped plans end where a rank has one queue, for all channels and swaps, and waits for each batch in turn."""

import random
from collections.abc import Iterator

import pytest
import torch

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from tests.support.waiting import stuck

SIZES = (*range(2, 10), 12, 16)


def options(name: str, n: int, parts: int) -> Iterator[dict]:
    """Every option of a strategy that changes who waits for whom, on n ranks of one of the parts of the heads."""
    sizes = [d for d in range(1, n + 1) if n % d == 0]
    match name:
        case "attention2d":
            yield from ({"grid": (a, n // a), "overlap": overlap} for a in sizes for overlap in (True, False))
        case "mesh":
            many, few = ({"heads": 8 * parts, "kv_heads": kv * parts} for kv in (8, 1))
            yield from ({"grid": (a, n // a), **how} for a in sizes for how in (many, few))
        case "loongtrain":
            yield from ({"inner_ring_size": w} for w in sizes)
        case "lightseq":
            yield from ({"balance": b, "prefetch": p} for b in (True, False) for p in (True, False))
        case _:
            yield {}


def masks(layout: str, n: int) -> set[Pairs]:
    """Causal, full, windows, documents, padding, and chance."""
    length, draw = 8 * n, random.Random(n)
    kinds = [Mask(), Mask(False), Mask(True, (8, 0)), Mask(True, (20, 0)), Mask(False, (3, 12))]
    for size in (3, 8, 20):
        ids = torch.arange(length) // size
        kinds += [Mask(documents=Documents(ids)), Mask(False, documents=Documents(ids.masked_fill(ids == 1, -1)))]
    chance = []
    for _ in range(2):
        chance.append(Pairs(tuple(draw.randrange(1 << n) for _ in range(n))))
    return {*(mask.pairs(*Chunks.pair(layout, n, length)) for mask in kinds), *chance}


def shipped(name: str, sizes: tuple[int, ...]) -> Iterator[tuple[str, Plan]]:
    strategy = STRATEGIES[name]
    for n in sizes:
        least = {"optional": 1, "required": 2, "all": n}[strategy.head_parallel]
        for heads in (d for d in range(least, n + 1) if n % d == 0):
            for layout in strategy.layouts:
                if heads > 1 and layout != strategy.layouts[0]:
                    continue  # a layout changes the steps through the mask alone
                for how in options(name, n // heads, heads):
                    for visible_pairs in masks(layout, n // heads):
                        for backward in (False, True):
                            plan = strategy.plan(
                                n,
                                layout=layout,
                                visible_pairs=visible_pairs,
                                backward=backward,
                                head_parallel_size=heads,
                                head_rounds=2 if heads > 1 and backward else 1,
                                **how,
                            )
                            yield f"{name} {n} {layout} {how} {heads} {visible_pairs.rows} {backward}", plan


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_queue_is_enough(name):
    for what, plan in shipped(name, (2, 3, 6)):
        assert not stuck(plan, one_queue=True), what


if __name__ == "__main__":  # all sizes: minutes
    for name in STRATEGIES:
        plans, failed = 0, []
        for what, plan in shipped(name, SIZES):
            plans += 1
            if lines := stuck(plan, one_queue=True):
                failed.append((what, lines))
        print(f"{name}: {plans} plans, {len(failed)} wait forever", flush=True)
        for what, lines in failed[:3]:
            print("  ", what, *lines, sep="\n    ")
