"""Predicts the attention of packed documents: static layouts beside a placement of its own for each batch.

    PYTHONPATH=. python benchmarks/placement.py --ranks 8 16 32 64 --cluster dgx-h100

Batches are drawn: documents of log-normal lengths, or a single one. Each rank has as many tokens. A block takes the
time of its visible pairs, at the cluster's rate for causal blocks of 8,192 rows, so the times of kernels with short
documents are not counted against anyone. Messages are simulated, with the rows that are sent. The best static case is
the fastest of all strategies and layouts on the same batch.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from rich.table import Table

from megatron.context_parallel.attention.plans import ROWS_UP_TO
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import BACKWARD, Cluster, load_cluster
from megatron.context_parallel.cluster.simulate.block_time import rate_at
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.cluster.step.placement_costs import placement_costs
from megatron.context_parallel.plan.ir import Attend
from megatron.context_parallel.plan.row_sets import RowSets
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.strategies import STRATEGIES, parse_spec
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Documents, Mask
from megatron.context_parallel.tokens.place_documents import Costs, place
from megatron.context_parallel.tokens.slices import Slices

LENGTHS = {"log-normal": (1100, 1.5), "long mixed": (8000, 1.4), "one document": None}
ROWS_OF_RATE = 8192


def main() -> None:
    args = _parse()
    show(*(_table(args, kind) for kind in args.lengths))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rows", type=int, default=16384, help="tokens of a rank; default: %(default)s")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=[*LENGTHS])
    parser.add_argument("--batches", type=int, default=3, help="batches that are drawn; default: %(default)s")
    parser.add_argument("--cluster", default="dgx-h100", help="description or preset; default: %(default)s")
    parser.add_argument("--ranks-per-node", type=int, help="default: devices of a node of the cluster")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def draw(kind: str, tokens: int, generator: np.random.Generator) -> Documents:
    """One sample of `tokens`, packed with documents; the last one is cut."""
    ends = [tokens]
    if LENGTHS[kind]:
        median, sigma = LENGTHS[kind]
        lengths = generator.lognormal(np.log(median), sigma, 1 + 100 * tokens // median).astype(int).clip(16)
        ends = [*np.cumsum(lengths)[np.cumsum(lengths) < tokens], tokens]
    return Documents.packed(torch.tensor([0, *ends]), tokens)


class Case:
    """The attention of one batch of documents on a cluster."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster, n: int, documents: Documents) -> None:
        self.args, self.cluster, self.n, self.documents = args, cluster, n, documents
        self.pairs: dict[tuple, np.ndarray] = {}
        self.shape = Shape(args.rows, args.heads, args.kv_heads, args.head_dim, 2)

    def seconds(self, spec: str, head_parallel_size: int, placed: bool, layout: str | None = None) -> float:
        """Both passes."""
        choice = parse_spec(spec, layout=layout, head_parallel_size=head_parallel_size)
        steps_on = self.n // head_parallel_size
        tokens = self.n * self.args.rows
        if placed:
            found = place(self.documents, steps_on, self.costs(head_parallel_size))
            mask, chunks = Mask(documents=self.documents.placed(found)), found
        else:
            mask, chunks = Mask(documents=self.documents), Slices.of(Chunks.of(choice.layout, steps_on, tokens))
        key = placed or choice.layout, steps_on
        if key not in self.pairs:
            self.pairs[key] = pair_counts(mask, chunks)
        pairs = self.pairs[key]
        visible = mask.pairs(chunks, chunks) if placed else mask.pairs(*Chunks.pair(choice.layout, steps_on, tokens))
        total = 0.0
        for backward in (False, True):
            plan = choice.plan(
                self.n,
                visible_pairs=visible,
                backward=backward,
                heads=self.args.heads,
                kv_heads=self.args.kv_heads,
            )
            rows = RowSets(plan, mask, chunks, chunks) if placed or steps_on <= ROWS_UP_TO else None
            block = self._block(pairs, head_parallel_size, backward)
            total += simulate(plan, self.cluster, self.shape, mask, blocks=block, rows=rows).seconds
        return total

    def _block(self, pairs: np.ndarray, head_parallel_size: int, backward: bool) -> Callable[[Attend], float]:
        rate = rate_at(self.cluster.device, "bf16", self.args.head_dim, True, ROWS_OF_RATE, backward)
        operations = 4 * self.args.head_dim * self.args.heads / head_parallel_size * (BACKWARD if backward else 1.0)

        def seconds(block: Attend) -> float:
            return float(pairs[np.ix_(block.q_chunks, block.kv_chunks)].sum()) * operations / rate

        return seconds

    def costs(self, head_parallel_size: int) -> Costs:
        """The costs of a placement, with a part of the heads."""
        heads, kv_heads = self.args.heads // head_parallel_size, max(1, self.args.kv_heads // head_parallel_size)
        shape = replace(self.shape, heads=heads, kv_heads=kv_heads, rows=ROWS_OF_RATE)
        return placement_costs(
            shape, self.cluster, ranks_per_node=max(1, self.cluster.devices_per_node // head_parallel_size)
        )


def pair_counts(mask: Mask, chunks: Slices) -> np.ndarray:
    """Visible pairs of a row of each query chunk and each key chunk, int64 [n, n]."""
    counts = np.zeros((chunks.n, chunks.n), np.int64)
    for q in range(chunks.n):
        first, end = (bound[0].numpy() for bound in mask.seen(chunks.positions(q)))
        end = np.maximum(first, end)
        for kv in range(chunks.n):
            counts[q, kv] = (chunks.before((kv,), end) - chunks.before((kv,), first)).sum()
    return counts


def _nodes(cluster: Cluster, ranks_per_node: int | None) -> Cluster:
    """The cluster with fewer devices on a node, each with its NIC."""
    if not ranks_per_node:
        return cluster
    return replace(cluster, devices_per_node=ranks_per_node, nics=replace(cluster.nics, per_node=ranks_per_node))


def static_cases(n: int, kv_heads: int) -> Iterator[tuple[str, int, str]]:
    """Strategies, head-parallel sizes and layouts."""
    for name, strategy in STRATEGIES.items():
        for size, layout in product([1, 2, 4, 8], strategy.layouts):
            alone = strategy.head_parallel == "all"
            if (
                n % size
                or size > kv_heads
                or (alone and size != n)
                or (strategy.head_parallel == "required") > size - 1
            ):
                continue
            yield name, size, layout


def _table(args: argparse.Namespace, kind: str) -> Table:
    columns = ("ranks", "static, no heads split", "static", "placed, no heads split", "placed", "gain", "gain, heads")
    table = Table(*columns, title=f"{kind}: ms of both passes of one layer on {args.cluster}, predicted")
    for n in args.ranks:
        cluster = _nodes(load_cluster(args.cluster), args.ranks_per_node).part(n)
        results = []
        for number in range(args.batches):
            generator = np.random.default_rng([args.seed, number, n])
            case = Case(args, cluster, n, draw(kind, n * args.rows, generator))
            static: dict[int, list[tuple[float, str]]] = {}
            for name, size, layout in static_cases(n, args.kv_heads):
                seconds = case.seconds(name, size, False, layout)
                static.setdefault(size > 1, []).append((seconds, f"{name} {layout} {size}"))
            sizes = [size for size in (1, 2, 4, 8) if n % size == 0 and size <= args.kv_heads]
            placed = {size: case.seconds("direct", size, True) for size in sizes}
            without, any_size = min(static[False])[0], min(min(of) for of in static.values())[0]
            results.append((without, any_size, placed[1], min(placed.values())))
            print(n, kind, sorted(static[False])[:2], sorted(static.get(True, []))[:2], placed, file=sys.stderr)
        middle = [statistics.median(column) for column in zip(*results, strict=True)]
        times = [f"{1e3 * seconds:.2f}" for seconds in middle]
        table.add_row(str(n), *times, f"{middle[0] / middle[2]:.2f}", f"{middle[1] / middle[3]:.2f}")
    return table


if __name__ == "__main__":
    run_main(main)
