"""Reads rates of a device off a trace of torch.profiler (`export_chrome_trace`, with `record_shapes=True`).

GPU kernels of PyTorch's attention and matrix products are read: the trace says what each computed, and how long it
took. Kernels of other libraries have no sizes there. Messages are not read: a kernel of NCCL also waits for its peer.
"""

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx.operator_schemas import get_signature_for_torch_op

from megatron.context_parallel.cluster.description import BACKWARD, MASKS, AttentionRate, Device, GemmRate
from megatron.context_parallel.errors import UsageError

FULL, CAUSAL = MASKS
DTYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"}
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1}  # the place of the first factor among the inputs
ATTENTION = {  # the dimension of tokens in queries and keys; heads are the other of 1 and 2
    "aten::_flash_attention_forward": 1,
    "aten::_flash_attention_backward": 1,
    "aten::_cudnn_attention_forward": 2,
    "aten::_cudnn_attention_backward": 2,
}
MASKING = ("cum_seq_q", "attn_bias", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes")
NOTHING = ("", "-1")  # values of inputs that mask nothing
DIGITS = 4


class Kind(NamedTuple):
    """Attention calls that take the same time. `keys`: None, as many as queries."""

    dtype: str
    head_dim: int
    mask: str
    rows: int
    keys: int | None


@dataclass(frozen=True)
class TraceRates:
    """What was read.

    Attributes:
        attention: by the number of queries and keys; of both passes.
        gemm: by size.
        calls: how many operations were read.
    """

    attention: tuple[AttentionRate, ...]
    gemm: tuple[GemmRate, ...]
    calls: int

    def of(self, device: Device) -> Device:
        """A device with these rates. Its others stay: of other dtypes, head sizes, masks, or of more keys than queries.

        Raises:
            UsageError: a rate is above the device's peak, so that the trace is of another device.
        """
        passes = [speed for rate in self.attention for speed in (rate.forward_TFLOP_s, rate.backward_TFLOP_s)]
        fastest = max([*passes, *(rate.TFLOP_s for rate in self.gemm)])
        if fastest > device.peak_TFLOP_s:
            why = f"the trace has {fastest:g} TFLOP/s, above the {device.peak_TFLOP_s:g} of {device.name}"
            raise UsageError(f"--trace: {why}; give --cluster the description of the devices that were profiled")
        read = {_alike(rate) for rate in self.attention}
        dtypes = {rate.dtype for rate in self.gemm}
        attention = (*(rate for rate in device.attention if _alike(rate) not in read), *self.attention)
        gemm = (*(rate for rate in device.gemm or () if rate.dtype not in dtypes), *self.gemm)
        return replace(device, attention=attention, gemm=gemm or None)


def read_rates(paths: Sequence[Path]) -> TraceRates:
    """The rates in traces of ranks: of each kind of call the median.

    Raises:
        UsageError: a file is no such trace, or has no operation that can be read.
    """
    attention = defaultdict[tuple[Kind, bool], list[float]](list)
    products = defaultdict[tuple[int, str], list[float]](list)
    calls = 0
    for path in paths:
        for name, arguments, seconds in _operations(path):
            if found := _attention(name, arguments):
                kind, backward, operations = found
                attention[kind, backward].append(operations / seconds)
            elif product := _product(name, arguments):
                size, dtype, operations = product
                products[size, dtype].append(operations / seconds)
            else:
                continue
            calls += 1
    both = [kind for kind, backward in attention if not backward and (kind, True) in attention]
    both.sort(key=str)
    rates = tuple(_rate(kind, attention[kind, False], attention[kind, True]) for kind in both)
    gemm = tuple(
        GemmRate(size=size, dtype=dtype, TFLOP_s=_median(rates)) for (size, dtype), rates in sorted(products.items())
    )
    if not (rates or gemm):
        why = "has no attention of PyTorch in both passes, and no matrix product, with their sizes"
        raise UsageError(f"--trace {paths[0]}: {why}; record one training step with record_shapes=True")
    return TraceRates(rates, gemm, calls)


def _operations(path: Path) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Operations with sizes that ran on a GPU: their name, arguments, and the seconds of their kernels."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(content)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"cannot be read ({type(error).__name__}: {error})"
        raise UsageError(f"--trace {path}: {why}; give a file of torch.profiler's export_chrome_trace") from None
    kernels = defaultdict[int, float](float)
    for event in events:
        if event.get("cat") == "kernel":
            kernels[event["args"].get("External id", -1)] += event["dur"]
    if not kernels:
        raise UsageError(f"--trace {path}: has no kernels of a GPU; measure a CPU with tools/cluster_probe.py")
    for event in events:
        if event.get("cat") == "cpu_op" and "Input Dims" in event.get("args", {}):
            arguments = event["args"]
            if microseconds := kernels.get(arguments.get("External id"), 0.0):
                yield event["name"], arguments, 1e-6 * microseconds


def _attention(name: str, arguments: dict[str, Any]) -> tuple[Kind, bool, float] | None:
    """The kind of an attention call, whether it is a backward pass, and its operations / 10^12.

    None: no attention, or a mask that is neither full nor causal.
    """
    if name not in ATTENTION:
        return None
    signatures = get_signature_for_torch_op(getattr(torch.ops.aten, name.removeprefix("aten::")).default)
    assert signatures  # it is an operation of PyTorch
    names = [*signatures[0].parameters]
    dims, values = arguments["Input Dims"], arguments.get("Concrete Inputs", [])
    given = dict(zip(names, values, strict=False))
    dtype = DTYPES.get(arguments["Input type"][names.index("query")])
    masked = [at for at, what in enumerate(names[: len(dims)]) if what in MASKING and dims[at]]
    if not dtype or masked or any(given.get(what, "") not in NOTHING for what in MASKING) or "is_causal" not in given:
        return None
    tokens = ATTENTION[name]
    query, key = (dims[names.index(what)] for what in ("query", "key"))
    rows, keys, head_dim = query[tokens], key[tokens], query[3]
    causal, backward = given["is_causal"] == "True", name.endswith("backward")
    if keys < rows or (causal and keys > rows):
        return None
    operations = 4 * query[0] * query[3 - tokens] * head_dim * rows * keys / (2 if causal else 1)
    kind = Kind(dtype, head_dim, CAUSAL if causal else FULL, rows, keys if keys > rows else None)
    return kind, backward, operations * (BACKWARD if backward else 1) / 1e12


def _product(name: str, arguments: dict[str, Any]) -> tuple[int, str, float] | None:
    """The size of a matrix product, its dtype, and its operations / 10^12."""
    if name not in PRODUCTS:
        return None
    first = PRODUCTS[name]
    (m, k), (_, n) = arguments["Input Dims"][first : first + 2]
    dtype = DTYPES.get(arguments["Input type"][first])
    return (round((m * n * k) ** (1 / 3)), dtype, 2 * m * n * k / 1e12) if dtype and m * n * k else None


def _rate(kind: Kind, forward: list[float], backward: list[float]) -> AttentionRate:
    return AttentionRate(**kind._asdict(), forward_TFLOP_s=_median(forward), backward_TFLOP_s=_median(backward))


def _alike(rate: AttentionRate) -> tuple:
    return rate.dtype, rate.head_dim, rate.mask, rate.keys is None


def _median(rates: list[float]) -> float:
    return float(f"{statistics.median(rates):.{DIGITS}g}")
