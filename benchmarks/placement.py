"""Predicts the attention of packed documents: static layouts beside a placement of its own for each batch.

    PYTHONPATH=. python benchmarks/placement.py --ranks 8 16 32 64 --cluster dgx-h100

Batches are drawn: documents of log-normal lengths, or a single one. Each rank has as many tokens. A block takes the
time of its visible pairs, at the cluster's rate for causal blocks of 8,192 rows, so the times of kernels with short
documents are not counted against anyone. Messages are simulated, with the rows that are sent. The best static case is
the fastest of all strategies and layouts on the same batch; "without direct" leaves out the strategy that is made for
documents. "resized" is a lower bound for Megatron's rule (`resizing.py`). The fastest cases are named on stderr.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.resizing import seconds_of_resizing
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import BACKWARD, Cluster, load_cluster
from megatron.context_parallel.cluster.simulate.block_time import rate_at
from megatron.context_parallel.cluster.step.attention_pass import attention_shape
from megatron.context_parallel.cluster.step.documents_time import RATE_ROWS, documents_forecast
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.placement_costs import costs_of_run
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.commands.plan_documents import draw_lengths, end_to_end
from megatron.context_parallel.strategies import STRATEGIES, parse_spec
from megatron.context_parallel.tokens.documents import Documents

LENGTHS = {"log-normal": (1100, 1.5), "long mixed": (8000, 1.4), "one document": None}
STATIC_UP_TO = 64  # ranks; with more, counting the pairs of static layouts takes minutes


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

    def seconds_of_resizing(self) -> float:
        """Both passes, if groups are resized, with the best of some limits for the tokens of a rank."""
        shape = attention_shape(self.model, self.run)
        rates = (rate_at(self.cluster.device, "bf16", shape.head_dim, True, RATE_ROWS, back) for back in (False, True))
        forward, backward = rates
        pair = 4 * shape.head_dim * shape.heads * (1 / forward + BACKWARD / backward)
        costs = replace(costs_of_run(self.model, self.run, self.cluster), pair=pair)
        lengths = np.diff(self.documents.edges[0]).tolist()
        n = self.run.context_parallel_size
        limits = [most for most in (4096, 8192, 16384) if most * n >= max(lengths)]
        return min(seconds_of_resizing(lengths, n, most, costs) for most in limits)


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
    columns = (
        "ranks",
        "static without direct, no heads split",
        "static, no heads split",
        "static",
        "resized groups",
        "placed, no heads split",
        "placed",
        *GAINS,
    )
    table = Table(*columns, title=f"{kind}: ms of both passes of one layer on {args.cluster}, predicted")
    for n in args.ranks:
        cluster = _nodes(load_cluster(args.cluster), args.ranks_per_node).part(n)
        found = []
        for number in range(args.batches):
            generator = np.random.default_rng([args.seed, number, n])
            batch = Batch(args, cluster, n, draw(kind, n * args.rows, generator))
            found.append(times_of(batch, args))
        of = Times(*(statistics.median(column) for column in zip(*found, strict=True)))
        gains = of.before / of.placed, of.static / of.placed, of.static_heads / of.placed_heads
        gains += (of.resized / of.placed_heads,)
        cells = [f"{1e3 * seconds:.2f}" for seconds in of] + [f"{gain:.2f}" for gain in gains]
        table.add_row(str(n), *("" if cell == "nan" else cell for cell in cells))
    return table


GAINS = ("gain without direct", "gain", "gain, heads", "gain over resizing")


class Times(NamedTuple):
    """Seconds of both passes of the fastest case: without splitting heads, and with any head-parallel size.

    `before` is static without `direct`.
    """

    before: float
    static: float
    static_heads: float
    resized: float
    placed: float
    placed_heads: float


class Case(NamedTuple):
    """A case that was predicted; it may have a head-parallel size above 1."""

    seconds: float
    spec: str
    heads: bool

    @property
    def direct(self) -> bool:
        return parse_spec(self.spec).strategy.name == "direct"


NONE = Case(math.nan, "none", False)


def times_of(batch: Batch, args: argparse.Namespace) -> Times:
    """The fastest cases, which are also printed."""
    n = batch.run.context_parallel_size
    static = []
    for size, spec in static_cases(n, args.kv_heads) if n <= STATIC_UP_TO else ():
        static.append(Case(batch.seconds(spec, False), spec, size > 1))
    sizes = [size for size in (1, 2, 4, 8) if n % size == 0 and size <= args.kv_heads]
    specs = [(size, parse_spec("direct", head_parallel_size=size).spec) for size in sizes]
    placed = [Case(batch.seconds(spec, True), spec, size > 1) for size, spec in specs]
    fastest = {
        "before": min((case for case in static if not case.heads and not case.direct), default=NONE),
        "static": min((case for case in static if not case.heads), default=NONE),
        "static_heads": min(static, default=NONE),
        "placed": placed[0],
        "placed_heads": min(placed),
    }
    for name, case in fastest.items():
        print(f"{n} ranks, {name}: {case.spec} {1e3 * case.seconds:.2f} ms", file=sys.stderr)
    resized = batch.seconds_of_resizing()
    return Times(**{name: case.seconds for name, case in fastest.items()}, resized=resized)


if __name__ == "__main__":
    run_main(main)
