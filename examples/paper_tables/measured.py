"""Reads the number of a cell from the output of a command."""

import csv
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from .cells import Cell
from .commands import ATTENTION, INFERENCE, TRAINING

PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
ITERATION = re.compile(
    r"iteration +\d+/.* \| ([\d.]+) ms \| ([\d.]+) tokens/s/rank(?: \| [\d.]+ TFLOP/s/rank, MFU ([\d.]+)%)?"
)


def measured(cell: Cell, command: Sequence[str], folder: Path, log: Path) -> float | None:
    """In the unit of the cell; None if the command has not written it."""
    for program, read in ((ATTENTION, _of_attention), (TRAINING, _of_training), (INFERENCE, _of_inference)):
        if program in command:
            return read(cell, folder, log)
    return None


def _of_attention(cell: Cell, folder: Path, log: Path) -> float | None:
    """The whole attention, or its forward or backward pass; the program times no part of a pass."""
    path = folder / "attention_time.json"
    if not path.exists() or cell.row.startswith("SeqAlltoAll"):
        return None
    result = json.loads(path.read_text())
    part = next((name for name in ("forward", "backward") if cell.column.endswith(name)), None)
    if cell.unit == "GB":
        size = result[f"{part}_bytes"]
        return None if size is None else size / 1e9
    return _time(cell.unit, result[part or "seconds"])


def _of_training(cell: Cell, folder: Path, log: Path) -> float | None:
    """The median of all iterations but the first."""
    found = ITERATION.findall(log.read_text()) if log.exists() else []
    if len(found) < 2:
        return None
    steps, speeds, mfus = zip(*found[1:], strict=True)
    if cell.unit == "tokens/s/GPU":
        return statistics.median(map(float, speeds))
    if cell.unit == "fraction":
        return statistics.median(map(float, mfus)) / 100 if all(mfus) else None
    return _time(cell.unit, statistics.median(map(float, steps)) / 1e3)


def _of_inference(cell: Cell, folder: Path, log: Path) -> float | None:
    """The first token, by pass-KV or pass-Q, or a decode step (TTIT); the program times no part of a pass."""
    path = folder / "passes.csv"
    if not path.exists() or not any(word in cell.column for word in ("TTFT", "TTIT", "pass-KV", "pass-Q")):
        return None
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    decode = "TTIT" in cell.column
    times = [float(line["milliseconds"]) for line in lines if (line["choice"] == "decode") is decode]
    return _time(cell.unit, times[0] / 1e3) if times else None


def _time(unit: str, seconds: float) -> float | None:
    if unit == "1e-2 iter/s":
        return 100 / seconds
    return seconds * PER_SECOND[unit] if unit in PER_SECOND else None
