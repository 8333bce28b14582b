"""Writes docs/five_papers.md: the attention of all five papers in the same training step, on one common cluster."""

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cache

from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.search.planner import GroupDevices
from megatron.context_parallel.cluster.search.step_search import workload_of
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.progress import tracked
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

from .cells import HERE, PAPERS, ROOT, words
from .systems import best_of, best_of_all

PAGE = ROOT / "docs" / "five_papers.md"
PRESET, NODES, MODEL = "dgx-h100", 8, "llama3-8b"
LENGTHS = {"128K": 2**17, "256K": 2**18, "512K": 2**19, "1M": 2**20, "2M": 2**21, "4M": 2**22}
AUTO = "auto"
NAMES = PAPERS | {"cp_inference": "Million-Token Inference (ring)", AUTO: "this project, `auto`"}
TABLES = "<!-- the tables -->\n"


@dataclass(frozen=True)
class Row:
    """A system at a length.

    Attributes:
        spec: the fastest way of the system, by prediction.
        attention: seconds of one attention, forward and backward.
        step, mfu: of a training step.
        fits: whether the step fits the memory.
    """

    spec: str
    attention: float
    step: float
    mfu: float
    fits: bool


@cache
def cluster() -> Cluster:
    return replace(load_cluster(PRESET), nodes=NODES)


def run_of(length: int, spec: str) -> TrainConfig:
    """All 64 GPUs share one sequence; weights and optimizer are sharded; all is recomputed but attention."""
    return TrainConfig(
        seq_length=length,
        cp_strategy=spec,
        context_parallel_size=cluster().ranks,
        data_parallel_sharding_strategy="optim",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        recompute_whitelist=("core_attention",),
    )


def rows_of(label: str) -> dict[str, Row]:
    """Of every system at one length."""
    length, place = LENGTHS[label], GroupDevices(cluster())
    model: ModelShape = preset_model(MODEL, length, 1)
    workload = workload_of(model, run_of(length, "ring"))
    found = {paper: best_of(paper, workload, place) for paper in PAPERS}
    found[AUTO] = best_of_all(workload, place)
    rows = {}
    for name, (spec, attention) in found.items():
        step = forecast_step(model, run_of(length, spec), cluster())
        rows[name] = Row(spec, attention, step.seconds, step.mfu, step.fits)
    return rows


def _tables(of: dict[str, dict[str, Row]]) -> Iterator[str]:
    heads = f"| system | {' | '.join(of)} |\n|---|" + "---|" * len(of)
    kinds = {
        "Tokens per second per GPU": lambda row, tokens: _marked(f"{tokens / row.step / cluster().ranks:.0f}", row),
        "MFU, percent": lambda row, tokens: _marked(f"{100 * row.mfu:.1f}", row),
        "One attention, forward plus backward, ms": lambda row, tokens: f"{1e3 * row.attention:.4g}",
        "Strategy of each system": lambda row, tokens: f"`{row.spec}`",
    }
    for title, cell in kinds.items():
        yield f"## {title}\n\n{heads}"
        for name in NAMES:
            yield f"| {NAMES[name]} | {' | '.join(cell(rows[name], LENGTHS[label]) for label, rows in of.items())} |"
        yield ""


def _marked(text: str, row: Row) -> str:
    return text if row.fits else f"{text}*"


def write_page(pool: Executor) -> None:
    """Fills the words of `five_papers.md` with the tables."""
    announce(f"predicting {len(LENGTHS)} lengths on {PRESET}")
    of = dict(zip(tracked(LENGTHS, "predicting lengths"), pool.map(rows_of, LENGTHS), strict=True))
    PAGE.write_text(words(HERE / "five_papers.md").replace(TABLES, "\n".join(_tables(of))))
