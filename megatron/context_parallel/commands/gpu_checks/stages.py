"""The stages of the check, each with its tables and targets, and the hardware and versions."""

import importlib.metadata
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from .bars import judge
from .common import CheckReport, CheckSizes
from .compile import compile_kernels
from .decode import check_decode
from .decode_model import TABLE as DECODE_MODEL
from .decode_model import TIMES as DECODE_TIMES
from .decode_model import check_decode_model
from .documents import measure_documents
from .errors import check_blocks, check_far_rows, check_other_blocks, check_strategies
from .memory import PeakMemory, measure_memory
from .nccl import check_nccl
from .speed import GpuClock, check_repeats, measure_overhead, measure_speed, ratios
from .step import check_step
from .te import check_te
from .tiles import time_tiles
from .training import check_training


class Host(NamedTuple):
    """The device of the checks, and their measuring tools."""

    device: torch.device
    gpus: int
    clock: GpuClock
    meter: PeakMemory


def run_stage(stage: str, report: CheckReport, names: list[str], sizes: CheckSizes, host: Host) -> list[dict]:
    """Adds a stage's tables to the report. Returns the result for each of its targets (None: not measured)."""
    tables, device = report.numbers, host.device
    match stage:
        case "compile":
            compile_kernels(report, names, sizes, device)
            return judge(stage, sum(bool(row["wrong"]) for row in tables["compiled"]))
        case "blocks":
            check_blocks(report, names, sizes, device)
            check_other_blocks(report, names, sizes, device)
            check_far_rows(report, names, sizes, device)
            return judge(stage, _failures(tables["blocks against float64"]))
        case "strategies":
            check_strategies(report, names, sizes, device)
            return judge(stage, _failures(tables["strategies against float64"]))
        case "speed":
            measure_speed(report, names, sizes, device, host.clock)
            speeds = tables["TFLOP/s, bfloat16"]
            return judge(stage, *(min(ratios(speeds, way), default=None) for way in ("forward", "backward")))
        case "decode":
            check_decode(report, sizes, device, host.clock)
            check_decode_model(report, sizes, device)
            return _judge_rows(stage, tables[stage] + tables[DECODE_MODEL] + tables[DECODE_TIMES])
        case "training":
            check_training(report, sizes, device)
        case "step":
            check_step(report, stage, sizes.step, device)
        case "longest":
            check_step(report, stage, sizes.longest, device)
        case "tiles":
            time_tiles(report, sizes, device, host.clock)
            return []
        case "executor":
            measure_overhead(report, names, sizes, device, host.clock)
            check_repeats(report, sizes, device)
            rows, repeats = tables["executor"], tables["repeats"]
            one_launch = [r for r in rows if (r["strategy"], r["backend"]) == ("attention2d", "triton")]
            return judge(
                stage,
                _of_all(one_launch, lambda r: r["launches"] / r["blocks"]),
                _of_all([r for r in rows if r["backend"] == "auto"], lambda r: r["overhead"]),
                _of_all(repeats, lambda r: r["differ"], sum),
                _of_all(repeats, lambda r: r["synchronisations"], sum),
            )
        case "documents":
            measure_documents(report, sizes, device)
            rows = tables["documents"]
            return judge(stage, max(r["ms"] for r in rows), sum(r["synchronisations"] for r in rows))
        case "memory":
            measure_memory(report, sizes, device, host.meter)
            return judge(stage, _of_all(tables["memory"], lambda r: r["share"]))
        case "nccl":
            check_nccl(report, sizes, host.gpus, "nccl" if device.type == "cuda" else "gloo")
            if calls := tables["calls of one rank"]:
                return judge(stage, _failures(calls))
        case _:
            check_te(report, sizes, device)
    return _judge_rows(stage, tables[stage])


def _judge_rows(stage: str, rows: list[dict]) -> list[dict]:
    """The result of a stage whose rows have verdicts; none if all were left out."""
    checked = [row for row in rows if "left_out" not in row]
    return judge(stage, _failures(checked)) if checked else []


def _of_all(rows: list[dict], number: Callable[[dict], float], over: Callable = max) -> float | None:
    """The largest number of a row, or the sum of all; None if there is no row, or one failed."""
    return over(map(number, rows)) if rows and not any(row.get("wrong") for row in rows) else None


def _failures(rows: list[dict]) -> int | None:
    """The number of rows over their bound; None if nothing was checked."""
    return sum(row["verdict"] == "FAIL" for row in rows) if rows else None


def setup(device: torch.device) -> dict[str, object]:
    """Hardware, driver, versions and command."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for package in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "transformer-engine", "megatron-core"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "driver": driver,
        "versions": versions,
        "command": shlex.join(["python", *sys.argv]),
    }
