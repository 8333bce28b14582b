"""The constants of the predictions of papers, as Markdown tables: set by hand, and fitted.

The numbers of a description that are in neither table are from data sheets or from a paper's text. Its `source` names
them.
"""

from typing import Any, NamedTuple

from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.fields import field_of

from .cells import PAPERS
from .predictions import predictor

AT_A_BOUND = 1e-3  # a fitted number that is so near to its bound would go further


class ByHand(NamedTuple):
    """A constant that is in no data sheet and that no fit chose.

    Attributes:
        testbed: the preset.
        name: a field of its description, or a name in the paper's `predict.py`.
        read_off: what it was read off.
        value: in words, of what is no field.
    """

    testbed: str
    name: str
    read_off: str
    value: str = ""


BY_HAND = (
    ByHand("lightseq", "nics.per_node", "the 151 ms of section 4.1: one NIC a box would take 0.9 s"),
    ByHand("lightseq", "inside.latency_us", "a guess"),
    ByHand("lightseq", "nics.latency_us", "a guess"),
    ByHand(
        "lightseq",
        "bound of backward attention",
        "the FlashAttention-2 paper; the fit ends at this bound, so the bound is the number",
        "210 TFLOP/s",
    ),
    ByHand("gtt", "device.attention[0].backward_TFLOP_s", "a guess; no cell depends on it"),
    ByHand("gtt", "device.attention[1].backward_TFLOP_s", "a guess; no cell depends on it"),
    ByHand("gtt", "`SENT`, bytes of a number of a partial output", "the All2All column of Table 5", "2"),
    ByHand("gtt", "sizes of the two attention rates", "a guess", "4096 and 32768 rows"),
    ByHand("gtt", "`MERGE_KERNELS` of a decode step", "the parts of Algorithm 4", "4"),
    ByHand("mesh-attention", "device.peak_TFLOP_s", "Tables 3 and 4: throughput over MFU"),
    ByHand("mesh-attention", "device.block_us", "a guess: short sequences on 128 GPUs of Tables 3 and 4 are slow"),
    ByHand("mesh-attention", "device.step_us", "a guess: the same cells"),
    ByHand("mesh-attention", "inside.GB_s", "a guess: PCIe 4"),
    ByHand("mesh-attention", "inside.latency_us", "a guess"),
    ByHand("mesh-attention", "nics.per_node", "a guess"),
    ByHand("mesh-attention", "nics.latency_us", "a guess"),
    ByHand("mesh-attention", "compute_slowdown", "Tables 3 and 4: passes take as long as blocks and messages together"),
    ByHand("mesh-attention", "message_slowdown", "the same"),
    ByHand("mesh-attention", "`TILES`, query chunks of a tile", "Figure 9b and Table 5 on 128 and 256 GPUs", "4 and 8"),
    ByHand(
        "mesh-attention",
        "`WORKSPACE`, in sizes of a query chunk, forward and backward",
        "the ring columns of the 512K rows of Table 5, which count as fitted",
        "8.4 and 7.7",
    ),
    ByHand("loongtrain", "NIC i serves GPUs 2i and 2i+1", "Table 4: head-first and context-first differ by it", "yes"),
    ByHand("loongtrain", "`overlap` of gradients and weights of DS-Ulysses", "Table 2: it is slower", "no"),
    ByHand("loongtrain", "bytes of a gradient of keys and values", "the paper's implementation", "2"),
    ByHand("attention2d-a100", "inside.GB_s", "a guess: PCIe 4"),
    ByHand("attention2d-a100", "nics.GB_s", "a guess: 100 Gb/s Ethernet"),
    ByHand("attention2d-a100", "nics.per_node", "a guess"),
    ByHand("attention2d-a100", "inside.latency_us", "a guess"),
    ByHand("attention2d-a100", "nics.latency_us", "a guess"),
    ByHand("attention2d-a100", "device.attention[0].forward_TFLOP_s", "a guess, as other rates of short blocks"),
    ByHand("attention2d-h100", "nics.GB_s", "a guess: 100 Gb/s Ethernet"),
    ByHand("attention2d-h100", "nics.latency_us", "a guess"),
    ByHand("attention2d-h100", "device.attention[0].forward_TFLOP_s", "a guess, as other rates of short blocks"),
    ByHand(
        "all without `device.gemm`",
        "`OF_PEAK`, rate of products of matrices",
        "a guess, among what is published for an H100 ([list](#gpt-3-of-mlperf))",
        "0.7 of the peak",
    ),
    ByHand(
        "all in FP8",
        "`FLOAT32_SUMS`, time of a backward product for a forward one",
        "the middle of what github.com/pytorch/ao/issues/2377 says",
        "1.15",
    ),
    ByHand("all", "`block_us` and `kernel_us` of a description without them", "a guess", "10 and 5 us"),
    ByHand("all", "kernels of a layer, forward and backward", "this project's layers", "11 and 15"),
)


def by_hand() -> str:
    """The table of `BY_HAND`, with the values that the descriptions have."""
    lines = ["| testbed | constant | value | read off |", "|---|---|---|---|"]
    for constant in BY_HAND:
        value = constant.value or f"{field_of(load_cluster(constant.testbed), constant.name):g}"
        name = constant.name if constant.value else f"`{constant.name}`"
        testbed = constant.testbed if constant.testbed.startswith("all") else f"`{constant.testbed}`"
        lines.append(f"| {testbed} | {name} | {value} | {constant.read_off} |")
    return "\n".join(lines)


def fitted() -> str:
    """The fields of all testbeds that `tools/calibrate.py` fits, with their start, bounds and values."""
    lines = ["| testbed | field | start | bounds | fitted |", "|---|---|---|---|---|"]
    for paper in PAPERS:
        for testbed, fields in _fields(paper).items():
            cluster = load_cluster(testbed)
            for name, (start, least, most) in fields.items():
                value = _fitted_value(cluster, name, least, most)
                lines.append(f"| `{testbed}` | `{name}` | {start:g} | {least:g} to {most:g} | {value} |")
    return "\n".join(lines)


def _fields(paper: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    of: Any = predictor(paper)
    found: dict[str, dict[str, tuple[float, float, float]]] = getattr(of, "FIELDS", {})
    return found


def _fitted_value(cluster: Cluster, name: str, least: float, most: float) -> str:
    value = field_of(cluster, name)
    near = any(abs(value / bound - 1) < AT_A_BOUND for bound in (least, most))
    return f"{value:g}, at its bound" if near else f"{value:g}"
