"""NVIDIA's table of long sequences, predicted: a test on numbers that are in none of the papers.

PYTHONPATH=. python -m examples.paper_tables.nemo_table
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import yaml

from megatron.context_parallel.cluster.description import AttentionRate, Cluster, load_cluster
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

from .cells import HERE, words
from .judged import median_and_worst

PRESET, MODEL = "dgx-h100", "llama2-7b"
LAYERS, HIDDEN, MLP, VOCABULARY = 32, 4096, 11008, 32000
FOLDER = HERE / "nemo"


class Row(NamedTuple):
    """A run of the table, and the operations a second of each GPU that it prints, in 10^12."""

    tokens: int
    gpus: int
    batch: int
    tp: int
    pp: int
    dp: int
    cp: int
    TFLOP_s: int

    @property
    def run(self) -> TrainConfig:
        return TrainConfig(
            seq_length=self.tokens,
            global_batch_size=self.batch,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            data_parallel_size=self.dp,
            context_parallel_size=self.cp,
            sequence_parallel=self.tp > 1,
            data_parallel_sharding_strategy="optim",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_accumulation_fusion=True,
            fp8="hybrid",
            partial_dtype="bf16",
            implementation="transformer_engine",
        )

    def operations(self, pairs: float) -> float:
        """Those of an iteration by NVIDIA's formula, with a part `pairs` of the pairs of a sequence counted."""
        products = 24 + 18 * MLP / HIDDEN + 6 * VOCABULARY / (LAYERS * HIDDEN)
        attention = 12 * self.tokens / HIDDEN * pairs
        return self.batch * self.tokens * LAYERS * HIDDEN**2 * (products + attention)


def rows() -> list[Row]:
    with (FOLDER / "long_sequences.csv").open(newline="") as file:
        return [Row(**{name: int(number) for name, number in line.items()}) for line in csv.DictReader(file)]


def readings() -> dict[str, tuple[Cluster, float]]:
    """The two readings of the table: a cluster, and the part of the pairs that is counted."""
    third = load_cluster(PRESET)
    rates = yaml.safe_load((FOLDER / "flash_attention_2.yaml").read_text())
    second = replace(third.device, attention=tuple(AttentionRate(**rate) for rate in rates))
    return {"FlashAttention-3, half": (third, 0.5), "FlashAttention-2, all": (replace(third, device=second), 1.0)}


def predicted(row: Row, cluster: Cluster, pairs: float) -> float:
    """TFLOP/s of each GPU."""
    seconds = forecast_step(preset_model(MODEL, row.tokens, row.tp), row.run, cluster).seconds
    return row.operations(pairs) / seconds / row.gpus / 1e12


def section() -> str:
    """The section of docs/reproduction.md."""
    known = rows()
    of = {name: [predicted(row, *reading) for row in known] for name, reading in readings().items()}
    headings = ["tokens", "GPUs", "tp x pp x dp x cp", "NVIDIA", *of]
    lines = [f"| {' | '.join(headings)} |", "|---|---|---|" + "---|" * (1 + len(of))]
    for i, row in enumerate(known):
        sizes = f"{row.tp} x {row.pp} x {row.dp} x {row.cp}"
        cells = [f"{of[name][i]:.0f} ({100 * (of[name][i] / row.TFLOP_s - 1):+.1f} %)" for name in of]
        lines.append(f"| {row.tokens // 1024}K | {row.gpus} | {sizes} | {row.TFLOP_s} | {' | '.join(cells)} |")
    said = [f"{name}: {_errors(known, numbers)}" for name, numbers in of.items()]
    how = "TFLOP/s of each GPU, predicted by `python -m examples.paper_tables.nemo_table`. Median and worst error:"
    return f"{words(FOLDER / 'notes.md')}\n{how}\n{'; '.join(said)}.\n\n" + "\n".join(lines) + "\n"


def _errors(known: Sequence[Row], numbers: Sequence[float]) -> str:
    return median_and_worst(number / row.TFLOP_s - 1 for number, row in zip(numbers, known, strict=True))


if __name__ == "__main__":
    print(section())
