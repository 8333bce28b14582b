"""`--dry-run`: computes parallel layout, attention traffic, parameters and memory in a single process."""

import os
from dataclasses import replace
from itertools import product

from rich.table import Table

from megatron.context_parallel.attention.plans import ALL_RANKS_UP_TO
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.search.auto import headline
from megatron.context_parallel.cluster.step.attention_pass import attention_plan, attention_rows, attention_shape
from megatron.context_parallel.plan.volume import received_bytes
from megatron.context_parallel.strategies import AUTO, Choice, distinct, parse_spec
from megatron.context_parallel.strategies.by_layer import written
from megatron.context_parallel.tokens.layout import positions

from .arguments.auto import planned, with_strategy
from .config.flags import Arguments
from .config.workload import model_of, run_of
from .memory_report import memory_table, named_device, verdict

_RANKS_SHOWN = 16
_GROUPS_SHOWN = 8


def describe(args: Arguments) -> None:
    """Print the tables of `--dry-run` for checked `args`. Creates no process group and no model."""
    if "WORLD_SIZE" not in os.environ:
        print(
            f"WORLD_SIZE is not set: assuming {args.world_size} ranks (tensor x pipeline x context), "
            "data-parallel size 1"
        )
    if not args.cp_layers and args.cp_cluster:
        found = planned(args, load_cluster(args.cp_cluster, "--cp-cluster"))
        print(headline(found))
        args = replace(with_strategy(args, parse_spec(found.best)), cp_cluster=args.cp_cluster)
    if not args.cp_layers:
        show(_layout(args))
        print(
            f"--cp-strategy {AUTO}: the run measures its cluster when it starts, and chooses then; "
            "give --cp-cluster to see the choice, traffic and memory now"
        )
    else:
        show(_layout(args), _work(args), memory_table(args))
        if room := named_device(args):
            print(verdict(args, room))
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
        of = f" of {choice.spec}" if len(choices) > 1 else ""
        what = f"{volume} received by the busiest rank, per layer{of} and micro batch"
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
    rows = attention_rows(model, run, plan)
    return max(received_bytes(plan, rank, shape, rows) for rank in ranks)


def _amount(size: int) -> str:
    unit, name = next(
        (u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if size >= u or u == 1
    )
    return f"{size / unit:.2f} {name}"
