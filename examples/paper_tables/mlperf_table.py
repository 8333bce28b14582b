"""GPT-3 175B of MLPerf Training on DGX-H100 nodes, predicted: a test on numbers that are in none of the papers.

PYTHONPATH=. python -m examples.paper_tables.mlperf_table
"""

import csv
from typing import NamedTuple

from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig

from .cells import HERE, words
from .judged import median_and_worst

PRESET, DEVICES = "dgx-h100", 8
FOLDER = HERE / "mlperf"
GPT3 = ModelShape(
    num_layers=96,
    hidden_size=12288,
    ffn_hidden_size=4 * 12288,
    num_attention_heads=96,
    num_query_groups=96,
    kv_channels=128,
    padded_vocab_size=51200,
    positions=2048,
    normalization="LayerNorm",
    swiglu=False,
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
)


class Row(NamedTuple):
    """A submission: its round, its sizes, and the seconds of an iteration by its logs."""

    round: str
    nodes: int
    batch: int
    micro: int
    tp: int
    pp: int
    vp: int
    seconds: float

    @property
    def run(self) -> TrainConfig:
        return TrainConfig(
            seq_length=2048,
            global_batch_size=self.batch,
            micro_batch_size=self.micro,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vp,
            data_parallel_size=self.nodes * DEVICES // self.tp // self.pp,
            sequence_parallel=True,
            data_parallel_sharding_strategy="optim",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            tp_comm_overlap=True,
            grad_reduce_in_bf16=True,
            gradient_accumulation_fusion=True,
            fp8="hybrid",
            fp8_param_gather=self.round == "4.0",
            implementation="transformer_engine",
        )


def rows() -> list[Row]:
    with (FOLDER / "gpt3.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    sizes = ("nodes", "batch", "micro", "tp", "pp", "vp")
    return [Row(line["round"], *(int(line[size]) for size in sizes), float(line["seconds"])) for line in lines]


def predicted(row: Row) -> float:
    """Seconds of an iteration."""
    return forecast_step(GPT3, row.run, load_cluster(PRESET)).seconds


def section() -> str:
    """The section of docs/reproduction.md."""
    lines = ["| round | GPUs | tp x pp x dp, virtual stages | batch, micro batch | MLPerf, s | predicted, s |"]
    lines.append("|---|---|---|---|---|---|")
    errors = []
    for row in rows():
        seconds = predicted(row)
        errors.append(seconds / row.seconds - 1)
        sizes = f"{row.tp} x {row.pp} x {row.run.data_parallel_size}, {row.vp}"
        cells = [row.round, str(DEVICES * row.nodes), sizes, f"{row.batch}, {row.micro}", f"{row.seconds:.3f}"]
        lines.append(f"| {' | '.join(cells)} | {seconds:.3f} ({100 * errors[-1]:+.1f} %) |")
    said = f"Median and worst error: {median_and_worst(errors)}."
    how = "Seconds of an iteration, predicted by `python -m examples.paper_tables.mlperf_table`."
    return f"{words(FOLDER / 'notes.md')}\n{how}\n{said}\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(section())
