"""Rates that are read off a trace of torch.profiler."""

import gzip
import json
from dataclasses import replace
from itertools import count

import pytest
import torch

from megatron.context_parallel import UsageError
from megatron.context_parallel.cluster.description import AttentionRate, GemmRate, load_cluster
from megatron.context_parallel.cluster.measure.trace_rates import read_rates
from megatron.context_parallel.commands.calibrate import main

HEADS, HEAD_DIM = 8, 128
PAIR = 4 * HEADS * HEAD_DIM / 1e6  # operations of a pair of rows; of one in a microsecond, TFLOP/s
numbers = count(10**6)


def kernels(number: int, microseconds: float) -> list[dict]:
    half = {"ph": "X", "cat": "kernel", "dur": microseconds / 2, "args": {"External id": number}}
    return [half, half]


def call(name: str, rows: int, keys: int, microseconds: float, **given: str) -> list[dict]:
    """An attention operation as the profiler records it, and its kernels."""
    names = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
    tokens = {"query": rows, "key": keys}
    arguments = {
        "External id": next(numbers),
        "Input Dims": [[1, tokens[what], HEADS, HEAD_DIM] if what in tokens else [] for what in names],
        "Concrete Inputs": [given.get(what, "") for what in names],
        "Input type": ["c10::BFloat16" if what in tokens else "" for what in names],
    }
    event = {"ph": "X", "cat": "cpu_op", "name": f"aten::{name}", "dur": 1.0, "args": arguments}
    return [event, *kernels(arguments["External id"], microseconds)]


def both(rows: int, keys: int, forward: float, backward: float, **given: str) -> list[dict]:
    each = ("forward", forward), ("backward", backward)
    return [event for way, time in each for event in call(f"_flash_attention_{way}", rows, keys, time, **given)]


@pytest.fixture
def products(tmp_path) -> list[dict]:
    """A real trace of a product of 64 x 128 and 128 x 32, as if a GPU had run it in 2 microseconds."""
    path = tmp_path / "products.json"
    a, b = torch.ones(64, 128).bfloat16(), torch.ones(128, 32).bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        torch.mm(a, b)
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    (product,) = (event for event in events if event.get("name") == "aten::mm")
    return [*events, *kernels(product["args"]["External id"], 2.0)]


def written(tmp_path, events: list[dict]):
    path = tmp_path / "rank0.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_rates_are_operations_over_the_time_of_kernels(tmp_path, products):
    events = [
        *products,
        *both(1024, 1024, 10.0, 40.0, is_causal="False"),
        *both(512, 2048, 10.0, 40.0, is_causal="False"),
    ]
    for time in (5.0, 6.0, 100.0):  # the median counts
        events += both(1024, 1024, time, 20.0, is_causal="True")
    events += both(1024, 1024, 1.0, 1.0, is_causal="True", window_size_left="128")  # other masks are not read
    events += call("_flash_attention_forward", 256, 256, 1.0, is_causal="True")  # nor what lacks a pass
    found = read_rates([written(tmp_path, events)])
    rates = {(rate.rows, rate.keys, rate.mask): rate for rate in found.attention}
    assert {*rates} == {(1024, None, "full"), (512, 2048, "full"), (1024, None, "causal")}
    assert rates[1024, None, "full"].forward_TFLOP_s == pytest.approx(PAIR * 1024**2 / 10, rel=1e-3)
    assert rates[512, 2048, "full"].backward_TFLOP_s == pytest.approx(2.5 * PAIR * 1024**2 / 40, rel=1e-3)
    assert rates[1024, None, "causal"].forward_TFLOP_s == pytest.approx(PAIR * 1024**2 / 2 / 6, rel=1e-3)
    assert found.gemm == (GemmRate(size=64, dtype="bf16", TFLOP_s=pytest.approx(2 * 64 * 128 * 32 / 2e6, rel=1e-3)),)


def test_rates_replace_those_of_their_kind(tmp_path, capsys):
    """What the trace lacks stays as in the description."""
    trace = written(tmp_path, both(1024, 1024, 10.0, 40.0, is_causal="True"))
    main(["--trace", str(trace), "--cluster", "dgx-h100", "--output", str(tmp_path / "here.yaml")])
    assert "read 1 kinds of attention calls, 0 sizes of products, 2 calls" in capsys.readouterr().out
    before, after = load_cluster("dgx-h100"), load_cluster(str(tmp_path / "here.yaml"))
    full = tuple(rate for rate in before.device.attention if rate.mask == "full")
    forward, backward = (float(f"{times * PAIR * 1024**2 / 2:.4g}") for times in (1 / 10, 2.5 / 40))
    read = AttentionRate(rows=1024, mask="causal", forward_TFLOP_s=forward, backward_TFLOP_s=backward)
    assert after.device == replace(before.device, attention=(*full, read))
    assert (
        after.source == f"{before.source}. Read off traces of 1 ranks: 1 kinds of attention calls, 0 sizes of products."
    )


def test_what_cannot_be_read_is_refused(tmp_path, products):
    fast = written(tmp_path, both(1024, 1024, 10.0, 2.5, is_causal="False"))
    command = ["--cluster", "dgx-h100", "--output", str(tmp_path / "here.yaml"), "--trace"]
    with pytest.raises(
        UsageError, match=r"--trace: the trace has 4295 TFLOP/s, above the 989.4 of H100 SXM; give --cl"
    ):
        main([*command, str(fast)])
    for events, message in (
        (products[:-2], "has no kernels of a GPU; measure a CPU with tools/cluster_probe.py"),
        (
            call("_flash_attention_forward", 64, 64, 1.0, is_causal="True"),
            "has no attention of PyTorch in both passes, ",
        ),
        ("none", "cannot be read"),
    ):
        path = written(tmp_path, events)
        path = path if events != "none" else tmp_path / "missing.json"
        with pytest.raises(UsageError, match=f"--trace {path}: {message}"):
            main([*command, str(path)])
