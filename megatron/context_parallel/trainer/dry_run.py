"""What a run would be: parallel layout, attention traffic, parameters and memory, worked out on this process alone."""

import os
from collections.abc import Iterator

from rich.table import Table

from ..context import ALL_RANKS_UP_TO
from ..layout import Chunks, positions
from ..mask import Mask
from ..plan.volume import Shape, received_bytes
from ..process_mesh import ProcessMesh
from ..tables import show
from .flags import Arguments
from .parameters import count_parameters, parameters_on_stage

_RANKS_SHOWN = 16
_GROUPS_SHOWN = 8


def describe(args: Arguments) -> None:
    """Print the tables of `--dry-run` for checked `args`. Makes no process group and no model."""
    if "WORLD_SIZE" not in os.environ:
        print(
            f"WORLD_SIZE is not set: assuming {args.world_size} ranks (tensor x pipeline x context), "
            "data-parallel size 1"
        )
    show(_layout(args), _work(args), _memory(args))
    if not any((args.data_path, args.train_data_path)):
        print("No data given, so none was checked.")


# ------------------------------------------------------------------------------------------- parallel layout


def groups(args: Arguments) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of every tensor-, context-, data- and pipeline-parallel group, in the order tp-cp-dp-pp."""
    mesh = ProcessMesh(
        ("tensor", "context", "data", "pipeline"),
        (
            args.tensor_model_parallel_size,
            args.context_parallel_size,
            args.data_parallel_size,
            args.pipeline_model_parallel_size,
        ),
    )
    return {name: sorted({mesh.along(rank, name) for rank in range(mesh.size)}) for name in mesh.names}


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
    first = positions(args.cp.layout, 0, n, args.seq_length)
    table = Table("quantity", "value", title="work")
    table.add_row("strategy and layout", f"{args.cp.spec}, {args.cp.layout}")
    table.add_row("sequence", f"{args.seq_length} tokens, {len(first)} per context rank")
    table.add_row(
        "batch",
        f"{args.global_batch_size} sequences = {micro_batches} micro batches of {args.micro_batch_size}"
        f" on each of {args.data_parallel_size} data ranks",
    )
    for name, backward in (("forward", False), ("backward", True)):
        volume = _gib(attention_bytes(args, backward))
        table.add_row(f"attention {name} traffic", f"{volume} received by the busiest rank per layer and micro batch")
    return table


def attention_bytes(args: Arguments, backward: bool) -> int:
    """Bytes the busiest context rank receives for one layer's attention of one micro batch, counted from the plan.

    Of too many ranks it looks at the first, the middle and the last.
    """
    n, mask = args.context_parallel_size, Mask(True, args.window_size or (-1, -1))
    heads = args.num_attention_heads // args.tensor_model_parallel_size
    kv_heads = max(1, args.num_query_groups // args.tensor_model_parallel_size)
    steps_on = args.cp.plan(n).n
    sees = mask.pairs(*Chunks.pair(args.cp.layout, steps_on, args.seq_length))
    plan = args.cp.plan(n, sees=sees, backward=backward, heads=heads, kv_heads=kv_heads)
    rows = args.seq_length // n * args.micro_batch_size
    shape = Shape(rows, heads, kv_heads, args.kv_channels, args.params_dtype.itemsize)
    ranks = range(n) if n <= ALL_RANKS_UP_TO else (0, n // 2, n - 1)
    return max(received_bytes(plan, rank, shape) for rank in ranks)


# -------------------------------------------------------------------------------------------------- memory


def memory_estimate(args: Arguments, stage: int = 0) -> Iterator[tuple[str, int, str]]:
    """(what, bytes, how it is counted) of one rank of pipeline stage `stage`."""
    count, dtype = parameters_on_stage(args, stage), args.params_dtype.itemsize
    yield "weights", count * dtype, f"{count:,} parameters x {dtype} bytes"
    yield "gradients", count * 4, "4 bytes (float32)"
    state = 12 if dtype == 2 else 8
    ranks = args.data_parallel_size * args.context_parallel_size if args.use_distributed_optimizer else 1
    parts = "float32 copy and two moments" if dtype == 2 else "two moments"
    yield "optimizer", count * state // ranks, f"{state} bytes ({parts}) / {ranks} data x context ranks that shard it"
    yield "activations", *_activations(args, stage)
    if stage == args.pipeline_model_parallel_size - 1:
        logits = _tokens(args) * args.padded_vocab_size // args.tensor_model_parallel_size
        yield "logits and loss", logits * (dtype + 4), f"tokens x vocabulary / tensor ranks x ({dtype} + 4) bytes"


def _tokens(args: Arguments) -> int:
    return args.micro_batch_size * args.seq_length // args.context_parallel_size


def _activations(args: Arguments, stage: int) -> tuple[int, str]:
    tensor, h = args.tensor_model_parallel_size, args.hidden_size
    whole = h / (tensor if args.sequence_parallel else 1)
    q, kv = args.kv_channels * args.num_attention_heads, args.kv_channels * args.num_query_groups
    mlp = args.ffn_hidden_size * (3 if args.swiglu else 2)
    layer = 4 * whole + (2 * q + 2 * kv + mlp) / tensor
    layers = args.num_layers / args.pipeline_model_parallel_size
    how = f"4h + (2q + 2kv + {3 if args.swiglu else 2} ffn) / tensor ranks values per token and layer"
    if args.sequence_parallel:
        how = how.replace("4h + (", "(4h + ")
    values = layers * layer
    if args.recompute_granularity == "full":
        each = args.recompute_num_layers
        assert each is not None  # full recomputation needs it
        kept = q / tensor if args.recompute_whitelist else 0
        if args.recompute_method == "uniform":
            values = layers / each * whole + each * layer + layers * kept
            how = f"h per {each} layers kept, and {each} layers at work: {how}"
        else:
            chunks = args.virtual_pipeline_model_parallel_size or 1
            values = chunks * each * (whole + kept) + (layers - chunks * each) * layer + layer
            how = f"h for {each} recomputed layers, others and one at work: {how}"
        how += " + q / tensor ranks a recomputed layer" if kept else ""
    in_flight = _in_flight(args, stage)
    return (
        round(values * in_flight * _tokens(args) * args.params_dtype.itemsize),
        f"{how}, x {in_flight:g} micro batches in flight",
    )


def _in_flight(args: Arguments, stage: int) -> float:
    """Micro batches whose activations a stage holds at once; an interleaved schedule counts in parts of a stage."""
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if virtual is None:
        return min(stages - stage, micro_batches)
    return min((stages * virtual + stages - 1 - 2 * stage) / virtual, micro_batches)


def _memory(args: Arguments) -> Table:
    stages = range(args.pipeline_model_parallel_size)
    fullest = max(stages, key=lambda stage: sum(size for _, size, _ in memory_estimate(args, stage)))
    total, tables = count_parameters(args)
    title = f"{total:,} parameters ({tables:,} in embeddings); a rank of stage {fullest}, the fullest"
    table = Table("memory", "per rank", "formula", title=title)
    items = list(memory_estimate(args, fullest))
    for what, size, how in items:
        table.add_row(what, _gib(size), how)
    table.add_row(
        "total", _gib(sum(size for _, size, _ in items)), "without buffers of communication and the allocator's loss"
    )
    return table


def _gib(size: int) -> str:
    unit, name = next(
        (u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if size >= u or u == 1
    )
    return f"{size / unit:.2f} {name}"
