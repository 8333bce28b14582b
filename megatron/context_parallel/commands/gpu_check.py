"""Checks the GPU path on one GPU, in stages; NCCL and Transformer Engine where they can be.

    cp-gpu-check --stage errors speed --output gpu_check.json

Each stage takes less than 8 minutes, all on one GPU less than 20. The JSON file is written after each. Exit status 1 if
an error is over its bound or a bar is missed. FLOPs are those of the pairs a mask lets through (the causal half):
4 x pairs x heads x head_dim forward, 2.5 times that backward.
"""

import importlib.metadata
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.context_parallel import UsageError
from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.kernels.names import BACKENDS

from .gpu_checks.common import CheckReport, CheckSizes, print_table
from .gpu_checks.documents import measure_documents
from .gpu_checks.errors import check_blocks, check_strategies
from .gpu_checks.memory import GpuMeter, PeakMemory, measure_memory
from .gpu_checks.nccl import check_nccl
from .gpu_checks.speed import GpuClock, check_repeats, measure_overhead, measure_speed, ratios
from .gpu_checks.te import check_te

BARS: dict[str, dict[str, tuple[str, float]]] = {
    "errors": {"errors over their bound": ("at most", 0)},
    "speed": {
        "step / best library's causal, forward": ("at least", 0.70),
        "step / best library's causal, backward": ("at least", 0.60),
    },
    "executor": {
        "launches per gathered block of attention2d": ("at most", 1),
        "executor: all but kernels / total": ("at most", 0.03),
        "results that differ in 5 repeats": ("at most", 0),
        "waits of the host for the GPU after the first run": ("at most", 0),
    },
    "documents": {
        "documents, ms of a micro batch on the critical path": ("at most", 10),
        "documents, waits of the host for the GPU": ("at most", 0),
    },
    "memory": {"peak of a rank's share / formula": ("at most", 1)},
    "nccl": {"errors between GPUs over their bound": ("at most", 0)},
    "te": {"errors inside Transformer Engine over their bound": ("at most", 0)},
}
STAGES = tuple(BARS)


class CheckFlags(FlagSection):
    stage: list[str] | None = flag("what to check", derived="all", choices=STAGES)
    output: Path = flag("JSON file", Path("gpu_check.json"))


PARSER = FlagParser(CheckFlags, __doc__, "[flags]")


class Host(NamedTuple):
    """What the checks run on, and what they measure with."""

    device: torch.device
    gpus: int
    clock: GpuClock
    meter: PeakMemory


def run_stage(stage: str, report: CheckReport, names: list[str], sizes: CheckSizes, host: Host) -> list[dict]:
    """Adds a stage's tables to the report; returns its bars, each with what was reached (None: not measured)."""
    tables, device = report.numbers, host.device
    match stage:
        case "errors":
            check_blocks(report, names, sizes, device)
            check_strategies(report, names, sizes, device)
            checked = [*tables["blocks against float64"], *tables["strategies against float64"]]
            return judge(stage, sum(row["verdict"] == "FAIL" for row in checked) if checked else None)
        case "speed":
            measure_speed(report, names, sizes, device, host.clock)
            speeds = tables["TFLOP/s, bfloat16"]
            return judge(stage, *(min(ratios(speeds, way), default=None) for way in ("forward", "backward")))
        case "executor":
            measure_overhead(report, names, sizes, device, host.clock)
            check_repeats(report, sizes, device)
            rows, repeats = tables["executor"], tables["repeats"]
            one_launch = [r for r in rows if (r["strategy"], r["backend"]) == ("attention2d", "triton")]
            return judge(
                stage,
                max((r["launches"] / r["blocks"] for r in one_launch), default=None),
                max((r["overhead"] for r in rows if r["backend"] == "auto"), default=None),
                sum(r["differ"] for r in repeats),
                sum(r["synchronisations"] for r in repeats),
            )
        case "documents":
            measure_documents(report, sizes, device)
            rows = tables["documents"]
            return judge(stage, max(r["ms"] for r in rows), sum(r["synchronisations"] for r in rows))
        case "memory":
            measure_memory(report, sizes, device, host.meter)
            return judge(stage, max(r["share"] for r in tables["memory"]))
        case "nccl":
            check_nccl(report, sizes, host.gpus)
        case _:
            check_te(report, sizes, device)
    if any("left_out" in row for row in tables[stage]):
        return []
    return judge(stage, sum(row["verdict"] == "FAIL" for row in tables[stage]))


def judge(stage: str, *reached: float | None) -> list[dict]:
    """The verdict on what was reached for each of a stage's bars."""
    bars = []
    for (bar, (sense, limit)), value in zip(BARS[stage].items(), reached, strict=True):
        met = value is not None and (value <= limit if sense == "at most" else value >= limit)
        bars.append({"bar": bar, "limit": f"{sense} {limit}", "reached": value, "verdict": "PASS" if met else "FAIL"})
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


def main(argv: list[str] | None = None) -> int:
    args = PARSER.parse(argv)
    if not torch.cuda.is_available():
        raise UsageError("needs a CUDA GPU, and there is none here; run it on a host with one")
    device = torch.device("cuda", torch.cuda.current_device())
    host = Host(device, torch.cuda.device_count(), GpuClock(), GpuMeter())
    report, bars, seconds = CheckReport(), list[dict](), dict[str, float]()
    for stage in args.stage or STAGES:
        shown, start = set(report.numbers), time.perf_counter()
        bars += run_stage(stage, report, list(BACKENDS[1:]), CheckSizes(), host)
        seconds[stage] = time.perf_counter() - start
        for title, rows in report.numbers.items():
            if rows and title not in shown:
                print_table(title, rows)
        content = {"setup": setup(device), "seconds": seconds, "bars": bars, "tables": report.numbers}
        args.output.write_text(json.dumps(content, indent=2) + "\n")
        print(f"\n{stage}: {seconds[stage]:.0f} s; wrote {args.output}", flush=True)
    if bars:
        print_table("bars", bars)
    return int(any(bar["verdict"] == "FAIL" for bar in bars))
