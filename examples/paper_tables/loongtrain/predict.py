"""LoongTrain's numbers on 8 nodes of 8 A100: attention alone, and iterations of Llama2-7B with and without GQA."""

import re
from functools import cache
from typing import NamedTuple

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.fields import with_field
from megatron.context_parallel.cluster.step.attention_pass import attention_plan, attention_seconds, attention_shape
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.plan.ir import T
from megatron.context_parallel.plan.volume import chunk_bytes, received_bytes
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

from ..cells import Wanted, cell_by_cell, every_third_row, everything
from ..commands import attention_command, training_command

TABLES = [f"table_{n}" for n in range(2, 7)] + [f"figure_{n}" for n in (4, 5, 13, 14)]
CLUSTER = dict.fromkeys(TABLES, "loongtrain")
FITTED = {table: every_third_row("loongtrain", table) for table in ("table_3", "table_4")}
FIELDS = {  # start: data sheets, and guesses where there are none; most: the ratings of chips and links
    "loongtrain": {
        "device.attention[0].forward_TFLOP_s": (220, 100, 250),
        "device.attention[0].backward_TFLOP_s": (190, 100, 250),
        "device.gemm[0].TFLOP_s": (218, 80, 280),
        "device.memory_GB_s": (1500, 500, 2039),
        "device.step_us": (30, 1, 200),
        "device.pass_us": (1000, 10, 5000),
        "device.swap_us": (200, 10, 2000),
        "device.packing_GB_s": (1000, 200, 2039),
        "inside.latency_us": (50, 1, 1000),
        "inside.stream_GB_s": (150, 30, 300),
        "nics.GB_s": (23, 10, 25),
        "nics.stream_GB_s": (21, 5, 25),
        "nics.latency_us": (20, 1, 1000),
        "compute_slowdown": (0.1, 0.01, 1),
        "message_slowdown": (0.1, 0.01, 1),
        "iteration_ms": (100, 1, 2000),
    }
}
LENGTHS = {"128K": 2**17, "256K": 2**18, "512K": 2**19, "1M": 2**20}
PLACEMENTS = {"HF": "head-first", "CF": "context-first"}
KEEPS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Case(NamedTuple):
    """The configuration with which one number was measured.

    Attributes:
        heads: "MHA" or "GQA".
        length: tokens of the sequence.
        strategy: spec of the attention.
        ranks: all of them, one context group.
        kept: whether attention's output is kept (Selective Checkpoint++).
        overlap: whether gradients and weights are sent while matrix products are computed.
    """

    heads: str
    length: int
    strategy: str
    ranks: int = 64
    kept: bool = False
    overlap: bool = True

    @property
    def model(self) -> ModelShape:
        return _model(self.heads, self.length)

    @property
    def run(self) -> TrainConfig:
        """One sequence an iteration, ZeRO 1. LoongTrain sends gradients of keys and values in bf16."""
        return TrainConfig(
            seq_length=self.length,
            context_parallel_size=self.ranks,
            cp_strategy=self.strategy,
            data_parallel_sharding_strategy="optim",
            overlap_grad_reduce=self.overlap,
            overlap_param_gather=self.overlap,
            recompute_whitelist=("core_attention",) if self.kept else (),
            partial_dtype="bf16",
            **KEEPS,
        )


@cache
def _model(heads: str, length: int) -> ModelShape:
    return preset_model("llama2-7b" if heads == "MHA" else "llama2-7b-gqa", length)


def two_d(hp: int, cp: int, placement: str = "HF", inner_ring: int = 1) -> str:
    """The spec of 2D-Attention. Without an inner ring it is a ring, as in all tables but Table 5."""
    options = f"loongtrain:inner_ring_size={inner_ring}"
    return options if hp == 1 else f"{options},head_parallel_size={hp},placement={PLACEMENTS[placement]}"


def tokens_per_second(case: Case, cluster: Cluster) -> float:
    """Of each GPU (the paper's TGS)."""
    return case.length / case.ranks / forecast_step(case.model, case.run, cluster).seconds


def flops_per_token(length: int) -> float:
    """The paper's count for its MFU, from its pairs of TGS and MFU: an MLP as of 4 matrices 4096 x 16/3 4096, MHA."""
    h, layers, vocabulary = 4096, 32, 32000
    return 3 * layers * h * h * (8 + 4 * 16 / 3) + 6 * vocabulary * h + 6 * layers * h * length


def mfu(case: Case, cluster: Cluster) -> float:
    return tokens_per_second(case, cluster) * flops_per_token(case.length) / (cluster.device.peak_TFLOP_s * 1e12)


def attention_ms(case: Case, cluster: Cluster, swaps: bool = False) -> float:
    """One attention, forward and backward, or its swaps of heads."""
    part = cluster.part(case.ranks)
    passes = [attention_seconds(case.model, case.run, part, backward) for backward in (False, True)]
    return 1e3 * sum(one.swaps if swaps else one.seconds for one in passes)


# -- the cases of tables ---------------------------------------------------------------------------------------


def case_of(table: str, row: str, column: str) -> Case:
    """The case of a cell of a table."""
    numbers = [int(word) for word in re.findall(r"\d+", row)]
    if table == "table_2":
        heads, _, length = column.split()
        strategy = {"DS-Ulysses": "ulysses", "Megatron-CP": "ring"}.get(row) or two_d(*numbers)
        return Case(heads, LENGTHS[length], strategy, 32, overlap=row != "DS-Ulysses")
    if table == "table_5":
        heads, _, cp, _, hp, length = column.split()
        return Case(heads, LENGTHS[length], two_d(int(hp), int(cp), "CF", numbers[0]))
    cp, hp = numbers
    if table == "table_4":
        heads, placement, length = column.split()
        return Case(heads, LENGTHS[length], two_d(hp, cp, placement))
    length, *_, placement = column.split()
    return Case(row.split()[0], LENGTHS[length], two_d(hp, cp, placement), kept="no SC++" not in column)


def cell(table: str, row: str, column: str, cluster: Cluster) -> float | None:
    """The prediction for a cell."""
    if table.startswith("figure"):
        return FIGURES[table](row, column, cluster)
    case = case_of(table, row, column)
    if table in ("table_4", "table_5"):
        return attention_ms(case, cluster, swaps=row.startswith("SeqAlltoAll"))
    if table == "table_6" or " TGS " in column:
        return tokens_per_second(case, cluster)
    return mfu(case, cluster)


def predict(table: str, cluster: Cluster, wanted: Wanted = everything) -> list[float | None]:
    """A number for each cell; None where none is possible, and for cells that are not wanted."""
    return cell_by_cell("loongtrain", table, lambda one: cell(table, one.row, one.column, cluster), wanted)


# -- figures ---------------------------------------------------------------------------------------------------


def figure_4(row: str, column: str, cluster: Cluster) -> float | None:
    """A batch of 4M tokens has 4 sequences, each on as many ranks as there are heads. Zero-bubble has no model here."""
    return 2**22 / 2**20 * _model("MHA", 2**20).num_attention_heads if column.startswith("maximum") else None


def figure_5(row: str, column: str, cluster: Cluster) -> float:
    """The forward pass of a ring."""
    ranks = 8 if row.startswith("8") else 64
    mha, gqa = (Case(heads, LENGTHS["128K"], "ring", ranks) for heads in ("MHA", "GQA"))
    plans = [attention_plan(case.model, case.run, False) for case in (mha, gqa)]
    shapes = [attention_shape(case.model, case.run) for case in (mha, gqa)]
    if column.startswith("MHA / GQA"):
        volumes = [received_bytes(plan, 0, shape) for plan, shape in zip(plans, shapes, strict=True)]
        return volumes[0] / volumes[1]
    if column.startswith("GQA volume"):
        return chunk_bytes(plans[1], T.KV, shapes[1], False) / 2**20
    idle = with_field(cluster.part(ranks), "device.attention[0].forward_TFLOP_s", 1e9)
    sending = attention_seconds(gqa.model, gqa.run, idle, False).seconds
    return sending / attention_seconds(gqa.model, gqa.run, cluster.part(ranks), False).compute


def figure_13(row: str, column: str, cluster: Cluster) -> float:
    """LoongTrain with all its techniques against a baseline of Table 2, at the best of the lengths it prints."""
    baseline = column.rsplit(" ", 1)[1]
    lengths = [length for length in LENGTHS if (baseline, length) != ("Megatron-CP", "1M")]  # out of memory there
    gains = []
    for length in lengths:
        best = Case(row, LENGTHS[length], two_d(8, 4), 32, kept=True)
        other = case_of("table_2", baseline, f"{row} TGS {length}")
        gains.append(tokens_per_second(best, cluster) / tokens_per_second(other, cluster))
    return max(gains)


def figure_14(row: str, column: str, cluster: Cluster) -> float:
    """Table 3: the best 2D-Attention, with or without kept outputs, against a ring or against itself."""
    heads, length = row.split()[0], LENGTHS[column.split()[0]]
    sizes = [(hp, 64 // hp, placement) for hp in (2, 4, 8, 16, 32) for placement in PLACEMENTS]

    def best(kept: bool) -> float:
        return max(mfu(Case(heads, length, two_d(*size), kept=kept), cluster) for size in sizes)

    ring = mfu(Case(heads, length, two_d(1, 64)), cluster)
    if "over" not in row:
        return ring
    return best("SC++" in row) / (best(False) if row.endswith("over 2D-Attn") else ring)


FIGURES = {"figure_4": figure_4, "figure_5": figure_5, "figure_13": figure_13, "figure_14": figure_14}


# -- commands --------------------------------------------------------------------------------------------------


def command(table: str, row: str, column: str) -> str:
    """The command that measures a cell; none for figures, which follow from tables."""
    if table.startswith("figure"):
        return ""
    case = case_of(table, row, column)
    if table in ("table_4", "table_5"):
        kv_heads = case.model.num_query_groups
        return attention_command(case.ranks, case.strategy, case.length, kv_heads=kv_heads)
    preset = "llama2-7b" if case.heads == "MHA" else "llama2-7b-gqa"
    flags = f"--preset {preset} --seq-length {case.length} --max-position-embeddings {case.length} --micro-batch-size 1"
    flags += f" --global-batch-size 1 --bf16 --mock-data --context-parallel-size {case.ranks}"
    flags += f" --cp-strategy {case.strategy} --use-distributed-optimizer --train-iters 10 --lr 1e-4"
    flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags += " --overlap-grad-reduce --overlap-param-gather" if case.overlap else ""
    return training_command(case.ranks, flags + (" --recompute-whitelist core_attention" if case.kept else ""))
