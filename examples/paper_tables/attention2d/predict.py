"""ATTENTION2D's stated numbers: training steps of GPT-3 models on its two testbeds. Nothing is fitted.

The paper states bounds over models and lengths, so each number is the least or the most over the cases of its figure.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

CLUSTER = {"figure_4": "attention2d-a100", "figure_5": "attention2d-a100", "figure_6": "attention2d-h100"}
FITTED: dict[str, Callable[[str, str], bool]] = {}
LAYERS = {"gpt3-66b": 8, "gpt3-175b": 6}  # of the pipeline stage that section 4.3 times
BATCH = {"gpt3-760m": 64, "gpt3-2.7b": 32, "gpt3-13b": 16, "gpt3-66b": 16, "gpt3-175b": 16}  # sequences, section 4
LENGTHS = tuple(2**power for power in range(13, 18))
RING, OVERLAP, NO_OVERLAP = "ring", "attention2d", "attention2d:overlap=no"


@cache
def seconds(cluster: Cluster, model: str, length: int, ranks: int, strategy: str) -> float:
    """An iteration with ZeRO; recomputed where the paper says so."""
    recompute = model == "gpt3-13b" and length >= 2**16
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    run = TrainConfig(
        seq_length=length,
        global_batch_size=BATCH[model],
        cp_strategy=strategy,
        context_parallel_size=ranks,
        data_parallel_sharding_strategy="optim",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        **full if recompute else {},
    )
    sizes = preset_model(model, length, 1)
    sizes = replace(sizes, num_layers=LAYERS.get(model, sizes.num_layers))
    return forecast_step(sizes, run, cluster).seconds


def speedups(cluster: Cluster, models: tuple[str, ...], ranks: int, strategy: str) -> list[float]:
    """Over Ring Attention, of each model and length."""
    cases = [(model, length) for model in models for length in LENGTHS]
    return [seconds(cluster, *case, ranks, RING) / seconds(cluster, *case, ranks, strategy) for case in cases]


def predict(table: str, cluster: Cluster) -> list[float | None]:
    if table == "figure_4":
        models = ("gpt3-760m", "gpt3-2.7b", "gpt3-13b")
        of = {(n, s): speedups(cluster, models, n, s) for n in (16, 64) for s in (NO_OVERLAP, OVERLAP)}
        least = [min(of[n, s]) for s in (NO_OVERLAP, OVERLAP) for n in (16, 64)]
        return [*least, max(of[64, NO_OVERLAP] + of[64, OVERLAP])]
    if table == "figure_5":
        small, large = (seconds(cluster, "gpt3-2.7b", 2**17, n, NO_OVERLAP) for n in (16, 64))
        return [None, small / large]
    best = []
    for model in ("gpt3-66b", "gpt3-175b"):
        best.append(max(max(speedups(cluster, (model,), 64, s)) for s in (NO_OVERLAP, OVERLAP)))
    return best


def command(table: str, row: str, column: str) -> str:
    """Bounds over many runs: none measures them."""
    return ""
