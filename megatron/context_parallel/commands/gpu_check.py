"""Checks the GPU path on one GPU: results against float64, TFLOP/s of each attention backend, overhead of the executor.

    cp-gpu-check --output gpu_check.json

Takes less than 8 minutes. Exit status 1 if an error is over its bound or a bar is missed. FLOPs are those of the pairs
a mask lets through (the causal half): 4 x pairs x heads x head_dim forward, 2.5 times that backward.
"""

import argparse
import importlib.metadata
import json
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from megatron.context_parallel import UsageError
from megatron.context_parallel.backends import BACKENDS

from .gpu_checks.common import Report, Sizes, print_table
from .gpu_checks.errors import check_blocks, check_strategies
from .gpu_checks.speed import GpuClock, measure_overhead, measure_speed, ratios

BARS = {
    "errors over their bound": ("at most", 0),
    "step / best library's causal, forward": ("at least", 0.70),
    "step / best library's causal, backward": ("at least", 0.60),
    "launches per gathered block of attention2d": ("at most", 1),
    "executor: all but kernels / total": ("at most", 0.03),
}


def check_all(names: list[str], sizes: Sizes, device: torch.device, clock: GpuClock) -> tuple[Report, list[dict]]:
    """Everything: the tables, and for each bar what was reached (None: not measured, which is a miss)."""
    report = Report()
    check_blocks(report, names, sizes, device)
    check_strategies(report, names, sizes, device)
    measure_speed(report, names, sizes, device, clock)
    measure_overhead(report, names, sizes, device, clock)
    checked = [row for rows in report.numbers.values() for row in rows if "verdict" in row]
    speeds, executor = report.numbers["TFLOP/s, bfloat16"], report.numbers["executor"]
    one_launch = [r for r in executor if (r["strategy"], r["backend"]) == ("attention2d", "triton")]
    reached = (
        sum(row["verdict"] == "FAIL" for row in checked) if checked else None,
        min(ratios(speeds, "forward"), default=None),
        min(ratios(speeds, "backward"), default=None),
        max((r["launches"] / r["blocks"] for r in one_launch), default=None),
        max((r["overhead"] for r in executor if r["backend"] == "auto"), default=None),
    )
    return report, judge(reached)


def judge(reached: tuple[float | None, ...]) -> list[dict]:
    """The verdict on what was reached for each of BARS."""
    bars = []
    for (bar, (sense, limit)), value in zip(BARS.items(), reached, strict=True):
        met = value is not None and (value <= limit if sense == "at most" else value >= limit)
        bars.append({"bar": bar, sense: limit, "reached": value, "verdict": "PASS" if met else "FAIL"})
    return bars


def setup(device: torch.device) -> dict[str, object]:
    """Hardware, driver, versions and command."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for package in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "transformer-engine", "megatron-core"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "versions": versions,
        "command": shlex.join(["python", *sys.argv]),
    }


def show(report: Report, bars: list[dict]) -> None:
    for title, rows in report.numbers.items():
        print_table(title, rows)
    limits = [{**bar, "limit": " ".join(map(str, BARS[bar["bar"]]))} for bar in bars]
    print_table("bars", [{name: bar[name] for name in ("bar", "limit", "reached", "verdict")} for bar in limits])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="JSON file (default: %(default)s)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UsageError("needs a CUDA GPU, and there is none here; run it on a host with one")
    device = torch.device("cuda", torch.cuda.current_device())
    report, bars = check_all(list(BACKENDS[1:]), Sizes(), device, GpuClock())
    show(report, bars)
    content = {"setup": setup(device), "bars": bars, "tables": report.numbers}
    args.output.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {args.output}")
    return int(any(bar["verdict"] == "FAIL" for bar in bars))
