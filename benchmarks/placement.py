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
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from rich.table import Table

from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.step.documents_time import documents_forecast
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.commands.plan_documents import draw_lengths, end_to_end
from megatron.context_parallel.strategies import STRATEGIES, parse_spec
from megatron.context_parallel.tokens.mask import Documents

LENGTHS = {"log-normal": (1100, 1.5), "long mixed": (8000, 1.4), "one document": None}


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
    lengths = draw_lengths(*LENGTHS[kind], tokens, generator) if LENGTHS[kind] else np.array([tokens])
    return end_to_end(lengths, tokens)


class Batch:
    """The attention of one batch of documents on a cluster."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster, n: int, documents: Documents) -> None:
        self.model = ModelShape(
            num_layers=1,
            hidden_size=1,
            ffn_hidden_size=1,
            num_attention_heads=args.heads,
            num_query_groups=args.kv_heads,
            kv_channels=args.head_dim,
            padded_vocab_size=1,
        )
        self.run = TrainConfig(seq_length=n * args.rows, context_parallel_size=n)
        self.cluster, self.documents = cluster, documents

    def seconds(self, spec: str, placed: bool) -> float:
        """Both passes."""
        run = replace(self.run, cp_strategy=spec)
        return documents_forecast(self.model, run, self.cluster, self.documents, placed).seconds


def _nodes(cluster: Cluster, ranks_per_node: int | None) -> Cluster:
    """The cluster with fewer devices on a node, each with its NIC."""
    if not ranks_per_node:
        return cluster
    return replace(cluster, devices_per_node=ranks_per_node, nics=replace(cluster.nics, per_node=ranks_per_node))


def static_cases(n: int, kv_heads: int) -> Iterator[tuple[int, str]]:
    """Head-parallel sizes, and specs with their layout."""
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
            yield size, parse_spec(name, layout=layout, head_parallel_size=size).spec


def _table(args: argparse.Namespace, kind: str) -> Table:
    columns = ("ranks", "static, no heads split", "static", "placed, no heads split", "placed", "gain", "gain, heads")
    table = Table(*columns, title=f"{kind}: ms of both passes of one layer on {args.cluster}, predicted")
    for n in args.ranks:
        cluster = _nodes(load_cluster(args.cluster), args.ranks_per_node).part(n)
        results = []
        for number in range(args.batches):
            generator = np.random.default_rng([args.seed, number, n])
            batch = Batch(args, cluster, n, draw(kind, n * args.rows, generator))
            static: dict[bool, list[tuple[float, str]]] = {}
            for size, spec in static_cases(n, args.kv_heads):
                static.setdefault(size > 1, []).append((batch.seconds(spec, False), spec))
            sizes = [size for size in (1, 2, 4, 8) if n % size == 0 and size <= args.kv_heads]
            placed = {size: batch.seconds(parse_spec("direct", head_parallel_size=size).spec, True) for size in sizes}
            without, any_size = min(static[False])[0], min(min(of) for of in static.values())[0]
            results.append((without, any_size, placed[1], min(placed.values())))
            print(n, kind, sorted(static[False])[:2], sorted(static.get(True, []))[:2], placed, file=sys.stderr)
        middle = [statistics.median(column) for column in zip(*results, strict=True)]
        times = [f"{1e3 * seconds:.2f}" for seconds in middle]
        table.add_row(str(n), *times, f"{middle[0] / middle[2]:.2f}", f"{middle[1] / middle[3]:.2f}")
    return table


if __name__ == "__main__":
    run_main(main)
