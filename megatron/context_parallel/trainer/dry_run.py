"""`--dry-run`: computes parallel layout, attention traffic, parameters and memory in a single process."""

import os
import tempfile
from dataclasses import replace
from itertools import product
from statistics import mean

from rich.table import Table

from megatron.context_parallel.attention.plans import ALL_RANKS_UP_TO
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.attention_pass import (
    attention_mask,
    attention_plan,
    attention_rows,
    attention_shape,
)
from megatron.context_parallel.cluster.step.documents_time import documents_forecast
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.volume import received_bytes
from megatron.context_parallel.strategies import AUTO, Choice, distinct
from megatron.context_parallel.strategies.by_layer import written
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import positions

from .arguments.auto import planned, with_strategy
from .config.flags import Arguments
from .config.workload import model_of, run_of
from .memory_report import longest_run, memory_table, named_device, verdict

_RANKS_SHOWN = 16
_GROUPS_SHOWN = 8


def describe(args: Arguments) -> None:
    """Print the tables of `--dry-run` for checked `args`. Creates no process group and no model."""
    if "WORLD_SIZE" not in os.environ:
        print(
            f"WORLD_SIZE is not set: assuming {args.world_size} ranks (tensor x pipeline x context), "
            "data-parallel size 1"
        )
    batches = _sample(args)
    if not args.cp_layers and args.cp_cluster:
        found = planned(args, load_cluster(args.cp_cluster, "--cp-cluster"), batches)
        print(found.line)
        args = replace(with_strategy(args, found.choice), cp_cluster=args.cp_cluster)
    if not args.cp_layers:
        show(_layout(args))
        print(
            f"--cp-strategy {AUTO}: the run measures its cluster when it starts, and chooses then; "
            "give --cp-cluster to see the choice, traffic and memory now"
        )
    else:
        memory = named_device(args)
        line = ""
        if memory and args.longest:
            args, line = longest_run(args, memory)
        elif memory:
            line = verdict(args, memory)
        show(_layout(args), _work(args), memory_table(args))
        if line:
            print(line)
        if batches and args.context_parallel_size > 1:
            try:
                show(_documents(args, batches))
            except UsageError as error:  # the cluster or the layout does not fit, which a placement may not need
                print(f"The gain of a placement of documents is not predicted: {error}")
    if not any((args.data_path, args.train_data_path)):
        print("No data was given, so none was checked.")


# ------------------------------------------------------------------------------------------- parallel layout


def groups(args: Arguments) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of every tensor-, context-, data- and pipeline-parallel group, in the order tp-cp-dp-pp."""
    run = run_of(args)
    return {name: run.groups(name) for name in run.mesh.names}


def _layout(args: Arguments) -> Table:
    table = Table("parallel", "size", "ranks of each group", title=f"{args.world_size} ranks, order tp-cp-ep-dp-pp")
    for name, members in groups(args).items():
        shown = " ".join(_short(group) for group in members[:_GROUPS_SHOWN])
        more = f" ... ({len(members)} groups)" if len(members) > _GROUPS_SHOWN else ""
        table.add_row(name, str(len(members[0])), shown + more)
    return table


def _short(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _RANKS_SHOWN:
        return "[" + ",".join(map(str, ranks)) + "]"
    return f"[{ranks[0]},{ranks[1]},...,{ranks[-1]}]"


# ---------------------------------------------------------------------------------------------------- work


def _work(args: Arguments) -> Table:
    n = args.context_parallel_size
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    layout = args.cp_layers[0].layout
    first = positions(layout, 0, n, args.seq_length)
    table = Table("quantity", "value", title="work")
    table.add_row("strategy and layout", f"{written(args.cp_layers)}, {layout}")
    table.add_row("sequence", f"{args.seq_length} tokens, {len(first)} per context rank")
    table.add_row(
        "batch",
        f"{args.global_batch_size} sequences = {micro_batches} micro batches of {args.micro_batch_size}"
        f" on each of {args.data_parallel_size} data ranks",
    )
    choices = distinct(args.cp_layers)
    for choice, (name, backward) in product(choices, (("forward", False), ("backward", True))):
        volume = _amount(attention_bytes(args, backward, choice))
        layer = f"layer of {choice.spec}" if len(choices) > 1 else "layer"
        what = f"{volume} received by the busiest rank, per {layer} and micro batch"
        table.add_row(f"attention {name} traffic", what)
    return table


def attention_bytes(args: Arguments, backward: bool, choice: Choice | None = None) -> int:
    """Bytes that the busiest context rank receives for the attention of one layer and micro batch, counted in the plan.

    `choice` is the layer's strategy (default: that of the first layer). With many ranks, only the first, the middle and
    the last rank are counted.
    """
    model, run, n = model_of(args), run_of(args, choice), args.context_parallel_size
    plan, shape = attention_plan(model, run, backward), attention_shape(model, run)
    ranks = range(n) if n <= ALL_RANKS_UP_TO else (0, n // 2, n - 1)
    rows = attention_rows(plan, attention_mask(model), run.seq_length)
    return max(received_bytes(plan, rank, shape, rows) for rank in ranks)


# ----------------------------------------------------------------------------------------------- documents


def _sample(args: Arguments) -> list[Documents]:
    """The documents of some micro batches of the run's data; none without data, or if they are not kept apart."""
    if not (args.reset_attention_mask and (args.mock_data or args.data_path or args.train_data_path)):
        return []
    from .data.batches import SAMPLED, build_datasets, sample_documents
    from .data.tokenizer import build_tokenizer

    samples = SAMPLED * args.micro_batch_size * args.data_parallel_size
    with tempfile.TemporaryDirectory() as cache:  # a dry run leaves nothing behind
        datasets = build_datasets(replace(args, data_cache_path=cache), build_tokenizer(args), (samples, 0, 0))
        return sample_documents(args, datasets[0])


def _documents(args: Arguments, batches: list[Documents]) -> Table:
    """What a placement gains for the documents of some micro batches: the layout of the strategy, and placements."""
    from .data.batches import PLACED_FOR

    name = args.cp_cluster or PLACED_FOR
    model, run = model_of(args), run_of(args)
    cluster = load_cluster(name)
    title = f"documents of {len(batches)} micro batches, attention of a layer, predicted for {name}"
    table = Table("tokens", "work of the busiest rank", "received by a rank at most", "both passes", title=title)
    cases = [(run.cp_strategy, False), (run.cp_strategy, True)]
    if args.cp_layers[0].strategy.name != "direct":
        cases.append(("direct", True))
    for spec, placed in cases:
        of_case = replace(run, cp_strategy=spec)
        found = [documents_forecast(model, of_case, cluster, documents, placed) for documents in batches]
        table.add_row(
            f"{spec}, placed" if placed else f"{spec}, {args.cp_layers[0].layout}",
            f"{mean(one.work for one in found):.2f} x the mean",
            _amount(round(mean(one.received for one in found))),
            f"{1e3 * mean(one.seconds for one in found):.4g} ms",
        )
    return table


def _amount(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.2f} B"
