"""LightSeq's numbers on one and two boxes of 8 A100: iterations of Llama-7B and its variants, in three systems."""

import re
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from megatron.context_parallel.cluster.description import Cluster, for_tensors
from megatron.context_parallel.cluster.step.attention_pass import attention_seconds
from megatron.context_parallel.cluster.step.memory import fullest
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.plan.trace import trace
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

from ..cells import Wanted, cell_by_cell, every_third_row, everything
from ..commands import training_command

CLUSTER = dict.fromkeys(("table_1", "table_2", "table_3", "table_4", "figure_5"), "lightseq")
ROWS = every_third_row("lightseq", "table_1")
FITTED = {"table_1": lambda row, column: column.endswith("time") and ROWS(row, column)}  # ratios follow from times
FIELDS = {  # start: data sheets, and guesses where there are none; most: the ratings of chips and links
    "lightseq": {
        "device.attention[0].forward_TFLOP_s": (150, 80, 250),
        "device.attention[0].backward_TFLOP_s": (190, 80, 210),
        "device.gemm[0].TFLOP_s": (200, 80, 218),
        "device.memory_GB_s": (1500, 500, 2039),
        "device.step_us": (30, 1, 1000),
        "device.pass_us": (300, 10, 5000),
        "inside.GB_s": (230, 100, 300),
        "inside.stream_GB_s": (150, 30, 300),
        "nics.GB_s": (11, 3, 12.5),
        "compute_slowdown": (0.1, 0.01, 1),
        "message_slowdown": (0.1, 0.01, 1),
        "iteration_ms": (300, 10, 2000),
    }
}
MODELS = {"Llama-7B": "llama-7b", "Llama-GQA": "llama-gqa", "Llama-33H": "llama-33h"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SYSTEMS = "Megatron-LM", "DeepSpeed-Ulysses", "LightSeq"
LONGEST = 512  # K tokens, the longest sequence that the paper tried
SMALL_GIB = 40.0  # of a GPU of Table 2


class Case(NamedTuple):
    """The configuration with which an iteration of one sequence was measured.

    Attributes:
        system: one of `SYSTEMS`.
        preset: of the model.
        ranks: all of them.
        each: tokens of a rank.
        kept: whether LightSeq keeps the output of attention.
    """

    system: str
    preset: str
    ranks: int
    each: int
    kept: bool = True

    @property
    def model(self) -> ModelShape:
        """Megatron-LM and Ulysses shard heads, so they pad them to a multiple of the ranks."""
        model = _model(self.preset)
        if self.system == "LightSeq":
            return model
        heads = -(-model.num_attention_heads // self.ranks) * self.ranks
        groups = heads if model.num_query_groups == model.num_attention_heads else model.num_query_groups
        return replace(model, num_attention_heads=heads, num_query_groups=groups)

    @property
    def run(self) -> TrainConfig:
        if self.system == "Megatron-LM":
            how: dict[str, Any] = {"tensor_model_parallel_size": self.ranks, "sequence_parallel": True}
        else:
            strategy = "lightseq" if self.system == "LightSeq" else "ulysses"
            how = {"context_parallel_size": self.ranks, "cp_strategy": strategy, "partial_dtype": "bf16"}
            how |= {"data_parallel_sharding_strategy": "optim_grads_params"}
            how |= {"recompute_whitelist": ("core_attention",) if self.kept and self.system == "LightSeq" else ()}
        return TrainConfig(seq_length=self.each * self.ranks, **how, **FULL)


@cache
def _model(preset: str) -> ModelShape:
    return preset_model(preset, 2**15)


def seconds(case: Case, cluster: Cluster) -> float:
    return forecast_step(case.model, case.run, cluster).seconds


# -- tables ----------------------------------------------------------------------------------------------------


def case_of(table: str, row: str, column: str) -> Case:
    """The case of a cell of Tables 1, 3 and 4."""
    if table == "table_3":
        return Case("LightSeq", "llama-7b", 8, 1024 * _number(column), kept=row == "Our ckpt")
    *model, system, ranks, each = (*column.split()[:1], *row.split()) if table == "table_1" else row.split()
    nodes, devices = map(int, ranks.split("x"))
    return Case(_system(system), MODELS[model[0]], nodes * devices, 1024 * _number(each))


def _number(text: str) -> int:
    return int(re.findall(r"\d+", text)[0])


def _system(name: str) -> str:
    return next(system for system in SYSTEMS if system.lower() == name.lower())


def cell(table: str, row: str, column: str, cluster: Cluster) -> float:
    """The prediction for a cell."""
    if table == "table_2":
        return float(longest(row, "llama-" + column.rsplit("-", 1)[1].lower(), cluster))
    if table == "figure_5":
        return figure_5(row, column, cluster)
    case = case_of(table, row, column)
    if table == "table_3" and row == "Speedup":
        return seconds(case, cluster) / seconds(case._replace(kept=True), cluster)
    if column.endswith("speedup"):
        return seconds(case._replace(system="Megatron-LM"), cluster) / seconds(case, cluster)
    return seconds(case, cluster)


def longest(system: str, preset: str, cluster: Cluster) -> int:
    """K tokens for each of 16 GPUs of 40 GB that fit, of the powers of two that the paper tried."""
    model = _model(preset)
    tensor = model.num_attention_heads
    others = 16 // tensor
    if _system(system.split()[0]) == "LightSeq":
        how: dict[str, Any] = {"context_parallel_size": 16, "cp_strategy": "lightseq"}
        how |= {"recompute_whitelist": ("core_attention",), "data_parallel_sharding_strategy": "optim_grads_params"}
    else:
        how = {"tensor_model_parallel_size": tensor, "sequence_parallel": True, "global_batch_size": others}
        how |= {"data_parallel_sharding_strategy": "optim"}
        how |= {"data_parallel_size" if system.endswith("DP") else "pipeline_model_parallel_size": others}
    fits = 0
    for thousands in (2**power for power in range(LONGEST.bit_length())):
        run = TrainConfig(seq_length=1024 * thousands, **how, **FULL) if thousands * 1024 >= 16 else None
        if run and fullest(model, run)[1].bytes <= for_tensors(SMALL_GIB):
            fits = thousands
    return fits


def figure_5(row: str, column: str, cluster: Cluster) -> float:
    """The schedule alone, the forward pass of a long sequence, and the time that communication adds to both passes."""
    if "GPUs" in row:
        spec = "lightseq:balance=no" if row.startswith("unbalanced") else "lightseq"
        if column.startswith("most"):
            plan = parse_spec(spec).plan(8)
            return sum(row.bit_count() for row in plan.visible_pairs.rows) / trace(plan).finish
        alone, together = (replace(Case("LightSeq", "llama-7b", n, 2**18 // n).run, cp_strategy=spec) for n in (1, 8))
        times = [
            attention_seconds(_model("llama-7b"), run, cluster.part(run.world_size), False).seconds
            for run in (alone, together)
        ]
        return times[0] / times[1]
    run = Case("LightSeq", "llama-7b", 16, 64 * _number(row.split()[1])).run
    if "without" in column:
        run = replace(run, cp_strategy="lightseq:prefetch=no")
    passes = [attention_seconds(_model("llama-7b"), run, cluster.part(16), backward) for backward in (False, True)]
    return 100 * sum(one.exposed for one in passes) / sum(one.compute for one in passes)


def predict(table: str, cluster: Cluster, wanted: Wanted = everything) -> list[float | None]:
    """A number for each cell; None for cells that are not wanted."""
    return cell_by_cell("lightseq", table, lambda one: cell(table, one.row, one.column, cluster), wanted)


def command(table: str, row: str, column: str) -> str:
    """The command that measures the time of a cell; none for ratios, sizes and the figure, which follow from others."""
    if table in ("table_2", "figure_5") or row == "Speedup" or column.endswith("speedup"):
        return ""
    case, run = case_of(table, row, column), case_of(table, row, column).run
    flags = f"--preset {case.preset} --seq-length {run.seq_length} --max-position-embeddings {run.seq_length}"
    flags += " --micro-batch-size 1 --global-batch-size 1 --bf16 --mock-data --train-iters 20 --lr 1e-4"
    flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if case.system == "Megatron-LM":
        heads = f" --num-attention-heads {case.model.num_attention_heads}"
        flags += f" --tensor-model-parallel-size {case.ranks} --sequence-parallel{heads}"
    else:
        flags += f" --context-parallel-size {case.ranks} --cp-strategy {run.cp_strategy} --use-distributed-optimizer"
    flags += " --recompute-whitelist core_attention" if run.recompute_whitelist else ""
    return training_command(case.ranks, flags)
