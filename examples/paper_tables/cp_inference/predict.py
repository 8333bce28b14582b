"""Context Parallelism for Scalable Million-Token Inference: Llama 3 405B on GTT. pass-KV is this project's `ring`."""

from collections.abc import Callable
from functools import cache

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.step.decode_time import decode_step
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.prefill_time import Prefill, PrefillForecast, prefill_seconds
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.inference.pass_q import RING_PASS_Q
from megatron.context_parallel.strategies import Choice
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

from ..cells import Cell, Wanted, cell_by_cell, every_third_row, everything
from ..commands import inference_command

PASS_KV, PASS_Q = "pass-KV", "pass-Q"
PLANS: dict[str, str | Choice] = {PASS_KV: "ring", PASS_Q: RING_PASS_Q}
FULL = 128_000  # tokens of "128K": the paper's K is 1000
SENT = 2  # bytes of a number of a partial output: Table 5's All2All fits 16 bits
FP8 = 1  # bytes of a weight of the feed-forward layers (section 4.1)
FLASH = 540  # TFLOP/s of FlashAttention-3 alone, appendix A
FLOPS = 4.9e18  # of 1M tokens, appendix A

TESTBED = "gtt"
TABLES = ("table_4", "table_5", "table_6", "table_7", "table_8", "figure_6", "figure_7", "figure_8", "figure_9")
CLUSTER = dict.fromkeys(TABLES, TESTBED)
FIELDS = {
    TESTBED: {
        "device.gemm[0].TFLOP_s": (600, 400, 800),
        "device.attention[0].forward_TFLOP_s": (500, 300, 800),
        "device.attention[1].forward_TFLOP_s": (540, 400, 800),
        "device.block_us": (15, 2, 100),
        "device.kernel_us": (5, 1, 20),
        "device.cache_us": (5000, 100, 10000),
        "inside.GB_s": (360, 200, 450),
        "inside.latency_us": (5, 1, 20),
        "nics.stream_GB_s": (40, 10, 50),
        "nics.latency_us": (20, 5, 100),
        "message_us": (10, 1, 50),
    }
}
FITTED = {table: every_third_row("cp_inference", table) for table in ("table_4", "table_5", "table_6")}


@cache
def model() -> ModelShape:
    return preset_model("llama3-405b", 131_072)


@cache
def first_token(
    cluster: Cluster,
    new: int,
    cached: int = 0,
    hosts: int = 1,
    tensor: int = 8,
    variant: str = PASS_KV,
    path: bool = False,
) -> PrefillForecast:
    """A prefill. `hosts`: context ranks; `path`: over a cache."""
    run = TrainConfig(seq_length=new, context_parallel_size=hosts, tensor_model_parallel_size=tensor)
    return prefill_seconds(model(), run, cluster, Prefill(new, cached, SENT, path, PLANS[variant]))


def ttft(cluster: Cluster, system: str, new: int = FULL) -> float:
    """ms of a full prefill on "CP2+TP8" or "TP16"."""
    hosts, tensor = sizes(system)
    return 1e3 * first_token(cluster, new, 0, hosts, tensor).seconds


def ttit(cluster: Cluster, system: str, context: int = FULL) -> float:
    """ms between two tokens."""
    hosts, tensor = sizes(system)
    return 1e3 * decode_step(model(), _decoding(hosts, tensor), cluster, context, 1, FP8).step


def sizes(system: str) -> tuple[int, int]:
    """Context and tensor ranks of "CP2+TP8" or "TP16"."""
    context, _, tensor = system.rpartition("+TP") if "+" in system else ("CP1", "", system[2:])
    return int(context[2:]), int(tensor)


def _decoding(hosts: int, tensor: int) -> TrainConfig:
    return TrainConfig(seq_length=hosts, context_parallel_size=hosts, tensor_model_parallel_size=tensor)


# -------------------------------------------------------------------------------------------------------- tables


def _table_4(cluster: Cluster, cell: Cell) -> float:
    _, cached, _, new = cell.row.split()
    return 1e3 * first_token(cluster, int(new), int(cached), 4, 8, cell.column, True).seconds


def _table_5(cluster: Cluster, cell: Cell) -> float:
    """us of a message and of a block in the second step of a ring; of the exchange, from the last block on."""
    rate, variant = cell.row.split()
    new = round(FULL * float(rate.rstrip("%")) / 100)
    forecast = first_token(cluster, new, FULL - new, 4, 8, variant, True)
    own = [span for span in forecast.spans if span.rank == 0]
    blocks = [span for span in own if not span.channel]
    if cell.column == "All2All":
        return 1e6 * (max(span.end for span in own) - max(span.end for span in blocks))
    wanted = blocks if cell.column == "Attn" else [span for span in own if span.channel]
    return 1e6 * next(span.end - span.start for span in wanted if span.step == 1)


def _table_6(cluster: Cluster, cell: Cell) -> float:
    system, what = cell.column.split()
    length = 1000 * int(cell.row.rstrip("K"))
    return (ttft if what == "TTFT" else ttit)(cluster, system, length)


def _table_7(cluster: Cluster, cell: Cell) -> float:
    return (ttft if cell.column == "TTFT" else ttit)(cluster, cell.row)


def _table_8(cluster: Cluster, cell: Cell) -> float:
    length, _, batch, what = cell.row.split(maxsplit=3)
    run = _decoding(*sizes(cell.column))
    step = decode_step(model(), run, cluster, 1000 * int(length.rstrip("K")), int(batch), FP8)
    return (
        1e6
        * {
            "Individual attention op": step.block,
            "Attn (whole ring loop)": step.blocks,
            "SendRecv": step.sent,
            "All2All": step.exchanged,
            "Whole pass-Q": step.attention,
        }[what]
    )


def _figure_7(cluster: Cluster, cell: Cell) -> float:
    """Percent."""
    tensor, context = cell.column.removeprefix("TTFT of ").split(" above ")
    return 100 * (ttft(cluster, tensor) / ttft(cluster, context) - 1)


def _figure_8(cluster: Cluster, cell: Cell) -> float:
    if cell.column == "TTFT":
        return ttft(cluster, "CP16+TP8", FULL if "128K" in cell.row else 1_000_000) / 1e3
    rate = FLOPS / (ttft(cluster, "CP16+TP8", 1_000_000) / 1e3) / 128 / 1e12
    of = {
        "TFLOP/s of a GPU": 100,
        "parallelization efficiency": FLASH,
        "FLOPS utilization": cluster.device.peak_TFLOP_s,
    }
    return 100 * rate / of[cell.column]


def _figure_9(cluster: Cluster, cell: Cell) -> float | None:
    """Percent of new tokens, in steps of a tenth."""
    for tenths in range(1, 1000):
        new = FULL * tenths // 1000
        kv, q = (first_token(cluster, new, FULL - new, 4, 8, variant, True).seconds for variant in PLANS)
        if kv < q:
            return tenths / 10
    return None


def _figure_6(cluster: Cluster, cell: Cell) -> float | None:
    """The other cell, the bandwidth on GTI, is what the description of GTI takes from the text."""
    return ttft(cluster, "CP8+TP8") / 1e3 if "TTFT" in cell.column else None


PREDICTED: dict[str, Callable[[Cluster, Cell], float | None]] = {
    "table_4": _table_4,
    "table_5": _table_5,
    "table_6": _table_6,
    "table_7": _table_7,
    "table_8": _table_8,
    "figure_6": _figure_6,
    "figure_7": _figure_7,
    "figure_8": _figure_8,
    "figure_9": _figure_9,
}


def predict(table: str, cluster: Cluster, wanted: Wanted = everything) -> list[float | None]:
    return cell_by_cell("cp_inference", table, lambda cell: PREDICTED[table](cluster, cell), wanted)


def command(table: str, row: str, column: str) -> str:
    """The share of one of 8 tensor ranks: benchmarks/inference.py has context ranks only. Parts of a pass have none."""
    words = column.split() if table == "table_6" else row.split()
    if table == "table_4":
        hosts, context, rate, choice = 4, FULL, int(words[3]) / FULL, column.lower()
    elif table in ("table_6", "table_7") and sizes(words[0])[1] == 8:
        hosts, rate, choice = sizes(words[0])[0], 1.0, "pass-kv"
        context = 1000 * int(row.rstrip("K")) if table == "table_6" else FULL
    else:
        return ""
    sizes_of_rank = (
        "--num-layers 126 --hidden-size 16384 --num-attention-heads 16 --num-query-groups 1 --kv-channels 128"
    )
    return inference_command(
        f"--ranks {hosts} --context {context} --miss-rates {rate:g} --choices {choice} {sizes_of_rank}"
    )
