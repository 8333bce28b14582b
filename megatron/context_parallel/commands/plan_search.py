"""Predicts the fastest way to train a model on a cluster: strategies, ZeRO, recomputation, parallel sizes."""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.plan_search()

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from megatron.context_parallel import UsageError
from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import TENSOR_SHARE, Cluster, for_tensors, load_cluster
from megatron.context_parallel.cluster.fields import what_if
from megatron.context_parallel.cluster.search.plainness import SURE
from megatron.context_parallel.cluster.step.train_config import (
    FULL_RECOMPUTE_FLAGS,
    ITEMSIZE,
    SHARDING,
    TrainConfig,
    sharding_flags,
)
from megatron.context_parallel.integration.bridge_recipe import is_recipe
from megatron.context_parallel.strategies import STRATEGIES, parse_spec
from megatron.context_parallel.trainer.config.flags import PRESETS

if TYPE_CHECKING:
    from megatron.context_parallel.cluster.search.step_search import FeasibleRun, StepSearch
    from megatron.context_parallel.cluster.step.model_shape import ModelShape

BASELINE = "ring"
# Median errors of predicted training steps that were published, in percent, with nothing fitted to their testbed: the
# worst table of LightSeq and LoongTrain; of NVIDIA, as it was predicted first; of MLPerf (docs/reproduction.md).
OFF = {"others": 6, "tensor-parallel ranks or FP8": 9, "pipelines": 14}
SMALLER = 0.95  # of the memory of the run above; smaller savings are not shown
UNITS = {"": 1, "K": 2**10, "M": 2**20}


def tokens(text: str) -> int:
    """A length such as 131072, 128K or 1M."""
    found = re.fullmatch(r"(\d+)([KM]?)", text)
    if not found:
        raise UsageError(f"--seq-length {text}: need a number of tokens, such as 131072, 128K or 1M")
    return int(found[1]) * UNITS[found[2]]


def model_name(text: str) -> str:
    """A preset of the trainer, a folder with a config.json, or a YAML file."""
    if text not in PRESETS and not (Path(text) / "config.json").is_file() and not is_recipe(text):
        files = "a folder with a config.json, or a recipe's run_config.yaml"
        raise UsageError(f"--model {text}: unknown; choose one of {', '.join(PRESETS)}, or give {files}")
    return text


class SearchFlags(FlagSection):
    model: str = flag(
        f"model preset of the trainer ({', '.join(PRESETS)}), a folder with HuggingFace's config.json, or the "
        "run_config.yaml of a Megatron-Bridge recipe",
        unit="NAME|DIR|FILE",
        read=model_name,
        example="llama3-8b",
    )
    seq_length: int = flag("number of tokens, such as 131072, 128K or 1M", read=tokens, example="128K")
    cluster: str = flag("preset or .yaml file of the cluster", unit="NAME", example="dgx-h100")
    what_if: str | None = flag(
        "predict for a cluster with other values of these fields", unit="FIELD=NUMBER,...", example="nics.GB_s=100"
    )
    nodes: int | None = flag("number of nodes", derived="that of the cluster's description", example=4)
    micro_batch_size: int = flag("sequences per rank and forward pass", 1)
    global_batch_size: int | None = flag("number of sequences per update", derived="a micro batch per data rank")
    dtype: str = flag("dtype of the model", "bf16", choices=(*ITEMSIZE,))
    fp8_format: str | None = flag(
        "compute the products of layers in this 8-bit format", choices=("e4m3", "hybrid"), example="hybrid"
    )
    tensor_model_parallel_size: int = flag("number of ranks that split every layer", 1)
    pipeline_model_parallel_size: int = flag("number of pipeline stages", 1)
    data_parallel_size: int = flag("number of data-parallel ranks", 1)
    expert_model_parallel_size: int = flag("number of ranks that the experts are sharded over", 1)
    documents: str | None = flag(
        "packed documents of a sequence: predict for them, in static layouts and placed, as cp-plan --documents",
        unit="LENGTHS|FILE",
        excludes="all",
        example="lognormal:8000,1.4",
    )
    all: bool = flag("try all tensor-, pipeline- and data-parallel sizes", False)
    why: bool = flag("also list the reasons for rejected candidates", False)
    longest: bool = flag("also show the longest sequence with which each run fits", False)
    explain: str | None = flag("show the time and memory of one run, by number or spec", unit="N|SPEC", example="1")
    timeline: Path | None = flag(
        "write a trace of its attention (.json)", endings=(".json",), needs="explain", excludes="documents"
    )


PARSER = FlagParser(
    SearchFlags,
    __doc__,
    "--model NAME --seq-length N --cluster NAME [flags]",
    [
        "--model llama3-8b --seq-length 128K --cluster dgx-h100",
        "--model llama3-8b --seq-length 128K --cluster dgx-h100 --nodes 4 --explain 1",
        "--model llama3-8b --seq-length 256K --cluster dgx-h100 --documents lognormal:8000,1.4",
    ],
)


def found_by(args: SearchFlags) -> "tuple[StepSearch, ModelShape, Cluster, str]":
    """The search of the flags, its model and cluster, and a title."""
    from megatron.context_parallel.cluster.search.step_search import search_steps
    from megatron.context_parallel.trainer.arguments.preset_model import preset_model

    cluster = load_cluster(args.cluster)
    cluster = what_if(cluster, args.what_if) if args.what_if else cluster
    cluster = replace(cluster, nodes=args.nodes) if args.nodes else cluster
    tensor, data = args.tensor_model_parallel_size, args.data_parallel_size
    context, over = divmod(cluster.ranks, tensor * args.pipeline_model_parallel_size * data)
    if over:
        raise UsageError(
            f"--data-parallel-size {data}: tensor x pipeline x data does not divide the {cluster.ranks} devices; give 1"
        )
    base = TrainConfig(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size or args.micro_batch_size * data,
        context_parallel_size=context,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        data_parallel_size=data,
        sequence_parallel=tensor > 1,
        dtype=args.dtype,
        fp8=args.fp8_format,
        moe_token_dispatcher_type="alltoall",
        implementation="transformer_engine" if args.fp8_format else "fused",
    )
    if args.fp8_format and cluster.device.peak_fp8_TFLOP_s is None:
        why = f"{cluster.device.name} has no device.peak_fp8_TFLOP_s; leave it out"
        raise UsageError(f"--fp8-format {args.fp8_format}: {why}")
    model = preset_model(args.model, args.seq_length, tensor)
    model = replace(model, expert_model_parallel_size=check_experts(args, model.num_experts, data * context))
    devices = f"{cluster.ranks} x {cluster.device.name}"
    title = f"{Path(args.model).name}, {args.seq_length} tokens, global batch {base.global_batch_size}, {devices}"
    announce(f"predicting the strategies for {devices}")
    if args.documents is None:
        return search_steps(model, cluster, base, args.all), model, cluster, title
    from megatron.context_parallel.cluster.search.documents import search_steps_of_documents
    from megatron.context_parallel.commands.plan_documents import read_documents

    if args.micro_batch_size > 1:
        why = "a micro batch of --documents is one sequence; give 1, and a longer --seq-length"
        raise UsageError(f"--micro-batch-size {args.micro_batch_size}: {why}")
    documents, lengths = read_documents(args.documents, args.seq_length)
    title += f", {len(lengths)} documents of {lengths.min()} to {lengths.max()} tokens"
    return search_steps_of_documents(model, cluster, base, documents), model, cluster, title


def check_experts(args: SearchFlags, experts: int | None, sharers: int) -> int:
    """The ranks over which experts are sharded. Raises UsageError where the trainer would."""
    over, why = args.expert_model_parallel_size, None
    if (experts or 1) % over:
        why = f"does not divide the {experts or 'missing'} experts of --model {args.model}"
    elif over > 1 and (args.all or args.tensor_model_parallel_size > 1):
        why = "was not tested with tensor parallelism, so not with --all"
    elif sharers % over:
        why = f"does not divide the {sharers} data x context ranks"
    if why:
        raise UsageError(f"--expert-model-parallel-size {over}: {why}; give 1")
    return over


# ------------------------------------------------------------------------------------------------------ tables


def flags(run: TrainConfig, model: "ModelShape", placed: bool = False) -> str:
    """A run of a model as flags of the trainer, or as Megatron's flags for features that the trainer lacks."""
    sizes = {
        "tensor-model-parallel-size": run.tensor_model_parallel_size,
        "pipeline-model-parallel-size": run.pipeline_model_parallel_size,
    }
    words = [f"--context-parallel-size {run.context_parallel_size} --cp-strategy {run.cp_strategy}"]
    words += ["--reset-attention-mask --cp-place-documents"] if placed else []
    words += [f"--{name} {size}" for name, size in sizes.items() if size > 1]
    if run.virtual_stages > 1:
        layers = model.num_layers // (run.pipeline_model_parallel_size * run.virtual_stages)
        words.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    words += [f"--micro-batch-size {run.micro_batch_size}"] if run.micro_batch_size > 1 else []
    words += ["--sequence-parallel"] if run.sequence_parallel else []
    if (over := model.expert_model_parallel_size) > 1:
        words.append(f"--expert-model-parallel-size {over} --moe-token-dispatcher-type {run.moe_token_dispatcher_type}")
    words += [f"--transformer-impl transformer_engine --fp8-format {run.fp8}"] if run.fp8 else []
    sharding, copies = run.data_parallel_sharding_strategy, run.num_distributed_optimizer_instances
    words += [sharding_flags(sharding, run.use_torch_fsdp2)] if sharding != "no_shard" else []
    words += [f"--num-distributed-optimizer-instances {copies}"] if sharding == "optim" and copies > 1 else []
    if sharding in SHARDING[:2]:  # Megatron-FSDP always overlaps what it shards, but for the optimizer
        words += ["--overlap-grad-reduce"] if run.overlap_grad_reduce else []
        words += ["--overlap-param-gather"] if run.overlap_param_gather else []
    if run.recompute_granularity == "full":
        words.append(FULL_RECOMPUTE_FLAGS)
        words += [f"--recompute-whitelist {' '.join(run.recompute_whitelist)}"] if run.recompute_whitelist else []
        words += ["--offload-checkpoints"] if run.offload_checkpoints else []
        words += ["--offload-kept"] if run.offload_kept else []
    elif run.recompute_granularity:
        words.append(f"--recompute-granularity selective --recompute-modules {' '.join(run.recompute_modules)}")
    return " ".join(words)


def strategy_of(one: "FeasibleRun") -> str:
    return parse_spec(one.run.cp_strategy).strategy.name


def answers(found: "StepSearch") -> "list[FeasibleRun]":
    """The fastest run of each strategy, placed and not, then runs of the fastest that need less and less memory."""
    best: dict[tuple[str, bool], FeasibleRun] = {}
    for one in found.ranked:
        best.setdefault((strategy_of(one), one.placed), one)
    shown = [*best.values()]
    leader = shown[0]
    least = leader.forecast.memory.bytes
    for one in found.ranked:
        alike = (one.run.cp_strategy, one.placed) == (leader.run.cp_strategy, leader.placed)
        if alike and one.forecast.memory.bytes < SMALLER * least:
            least = one.forecast.memory.bytes
            shown.append(one)
    return shown


def ranking(shown: "list[FeasibleRun]", title: str, documents: bool, lengths: list[int]) -> Table:
    """Runs with their speed and memory, numbered for --explain.

    Args:
        documents: the sequence is packed documents, whose operations are not counted.
        lengths: of the longest sequence of each run, or empty.
    """
    from megatron.context_parallel.cluster.step.stage_time import EXPOSED

    meshes = {one.run.mesh for one in shown}
    micro_batches = {one.run.micro_batch_size for one in shown}
    interleaved = any(one.run.virtual_stages > 1 for one in shown)
    ring = next((one.forecast.seconds for one in shown if strategy_of(one) == BASELINE), None)
    table = Table("#", title=title)
    for number, one in enumerate(shown, 1):
        run, forecast, placed = one
        rate = run.global_batch_size * run.seq_length / forecast.seconds / run.world_size
        numbers = {"seconds": f"{forecast.seconds:.4g}", "±": f"{OFF[kind_of(run)]} %"}
        if ring:
            numbers["x ring"] = f"{ring / forecast.seconds:.2f}"
        numbers["tokens/s/GPU"] = f"{rate:,.0f}"
        if not documents:
            numbers["MFU"] = f"{forecast.mfu:.1%}"
        numbers["GiB"] = f"{forecast.memory.bytes / 2**30:.1f}"
        numbers["exposed"] = f"{forecast.parts[EXPOSED] / forecast.seconds:.1%}"
        if lengths:
            numbers["longest"] = f"{lengths[number - 1]:,}"
        words = {"strategy": f"{run.cp_strategy}, placed" if placed else run.cp_strategy}
        words["sharded"] = run.data_parallel_sharding_strategy.removeprefix("no_shard").replace("_", " ")
        words["recomputed"] = recomputed(run)
        if len(meshes) > 1:
            words["tp x cp x dp x pp"] = " x ".join(map(str, run.mesh.sizes))
        if len(micro_batches) > 1:
            words["micro batch"] = str(run.micro_batch_size)
        if interleaved:
            words["virtual stages"] = str(run.virtual_stages)
        if number == 1:
            for heading in numbers:
                table.add_column(heading, justify="right")
            for heading in words:
                table.add_column(heading)
        table.add_row(f"{number}" if one.trains else f"{number}*", *numbers.values(), *words.values())
    return table


def kind_of(run: TrainConfig) -> str:
    """The kind of published training steps that a run is like, a key of `OFF`."""
    if run.pipeline_model_parallel_size > 1:
        return "pipelines"
    return "tensor-parallel ranks or FP8" if run.fp8 or run.tensor_model_parallel_size > 1 else "others"


def recomputed(run: TrainConfig) -> str:
    """What the backward pass computes again."""
    if run.recompute_granularity == "full":
        what = "all but attention" if run.recompute_whitelist else "all"
        return f"{what}, offloaded" if run.offload_checkpoints else what
    return ", ".join(run.computed_again)


def legend(found: "StepSearch", shown: "list[FeasibleRun]", model: "ModelShape", room: float, longest: bool) -> str:
    """The legend of the table, and the flags of the fastest run; `room` is the memory of a device in GiB."""
    from megatron.context_parallel.cluster.search.step_search import FAR

    lines = [
        "Predicted: the fastest run of each strategy, then the fastest strategy with less memory.",
        "±: median error of predictions of published training steps of this kind, with nothing fitted: "
        + ", ".join(f"{percent} % for {kind}" for kind, percent in OFF.items())
        + " (docs/reproduction.md).",
        f"GiB: tensors on the busiest rank. A device has {room:g} GiB; {TENSOR_SHARE:.0%} of it may be tensors.",
        "exposed: fraction of the time in which attention communication is not hidden by computation.",
    ]
    if longest:
        lines.append("longest: tokens of the longest sequence with which the run fits, without other changes.")
    if any(one.run.offload_checkpoints for one in shown):
        lines.append("offloaded: inputs of layers, and attention's output if it is kept, are in host memory.")
    if not all(one.trains for one in shown):
        lines.append("*: the trainer does not support this combination; it is predicted for Megatron-FSDP in general.")
    planned = {name for name, strategy in STRATEGIES.items() if strategy.planned}  # the others are for documents
    for name in sorted(planned - {strategy_of(one) for one in shown}):
        why = next(
            (reason for spec, reason in found.rejected if parse_spec(spec).strategy.name == name), "no candidate"
        )
        lines.append(f"{name} is not shown: {why}")
    if found.rejected:
        lines.append(f"{len(found.rejected)} candidates were rejected; --why lists the reasons.")
    if found.far:
        lines.append(
            f"{found.far} splits of the ranks were not tried: at best they take {FAR:g} times as long, or longer."
        )
    if gain := gain_of_placement(found):
        lines.append(gain)
    if best := found.best:
        fastest = next(one for one in found.ranked if one.trains)
        named = "fastest" if best == fastest else f"plainest strategy within {SURE:.0%} of the fastest"
        lines.append(f"To train with the {named}: {flags(best.run, model, best.placed)}")
    return "\n".join(lines)


def longest_of(shown: "list[FeasibleRun]", model: "ModelShape", cluster: Cluster) -> list[int]:
    """Tokens of the longest sequence with which each run fits a device."""
    from megatron.context_parallel.cluster.step.longest import longest

    return [longest(model, one.run, for_tensors(cluster.device.memory_GiB)).tokens for one in shown]


def gain_of_placement(found: "StepSearch") -> str | None:
    """What placing the documents gains, in a line; None if nothing was placed."""
    placed = next((one for one in found.ranked if one.placed), None)
    static = next((one for one in found.ranked if not one.placed), None)
    if not (placed and static):
        return None
    before, after = static.forecast.seconds, placed.forecast.seconds
    return (
        f"Documents placed: {after:.4g} s an iteration, with {placed.run.cp_strategy}; in a static layout {before:.4g} "
        f"s, with {static.run.cp_strategy}: a placement is {before / after:.2f} times as fast."
    )


def refusals(found: "StepSearch") -> Table:
    """The reasons for rejected candidates."""
    table = Table("candidates", "reason", title="rejected")
    for reason, count in Counter(reason for _, reason in found.rejected).most_common():
        table.add_row(str(count), reason)
    return table


def explanation(found: "FeasibleRun", model: "ModelShape") -> list[Table]:
    """The parts of a run's time and memory."""
    run, forecast, placed = found
    time = Table("part", title=f"{flags(run, model, placed)}\n\ntime of an iteration")
    time.add_column("seconds", justify="right")
    time.add_column("share", justify="right")
    for name, seconds in forecast.parts.items():
        if seconds:
            time.add_row(name, f"{seconds:.4g}", f"{seconds / forecast.seconds:.1%}")
    memory = Table("memory", title=f"memory of a rank of the busiest stage: {forecast.memory.name}")
    memory.add_column("GiB", justify="right")
    memory.add_column("formula")
    for part in forecast.memory.items:
        memory.add_row(part.what, f"{part.bytes / 2**30:.2f}", part.formula)
    return [time, memory]


def asked(found: "StepSearch", shown: "list[FeasibleRun]", which: str) -> "FeasibleRun":
    """The run with a number of the table, or the fastest run with a spec. Raises UsageError if there is none."""
    if which.isdecimal() and 1 <= int(which) <= len(shown):
        return shown[int(which) - 1]
    runs = [one for one in found.ranked if one.run.cp_strategy == which]
    if runs:
        return runs[0]
    why = next((reason for spec, reason in found.rejected if spec == which), "no such prediction")
    if ":" in which and which.split(":")[0] not in STRATEGIES:  # of a file or module
        why = "of strategies of your own only installed ones are searched; cp-plan predicts the attention of others"
    raise UsageError(f"--explain {which}: {why}; give a number of the table, such as 1")


def main(argv: list[str] | None = None) -> None:
    args = PARSER.parse(argv)
    found, model, cluster, title = found_by(args)
    if not found.ranked:
        show(refusals(found))
        raise UsageError(f"--nodes {cluster.nodes}: no run fits into memory; give more nodes, or --all")
    shown = answers(found)
    if not args.explain:
        lengths = longest_of(shown, model, cluster) if args.longest else []
        table = ranking(shown, title, args.documents is not None, lengths)
        show(table, *([refusals(found)] if args.why and found.rejected else []))
        print(legend(found, shown, model, cluster.device.memory_GiB, args.longest))
        return
    one = asked(found, shown, args.explain)
    show(*explanation(one, model))
    if args.timeline:
        from megatron.context_parallel.cluster.simulate.timeline import write_timeline
        from megatron.context_parallel.cluster.step.attention_pass import attention_forecast

        passes = {
            way: attention_forecast(model, one.run, cluster, way == "backward") for way in ("forward", "backward")
        }
        write_timeline(passes, args.timeline)
        print(f"wrote {args.timeline}")
