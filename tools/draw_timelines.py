"""Draws the forward pass of one layer twice, one above the other: as `tools/plan.py --timeline` predicted it, and as
`--profile --use-pytorch-profiler` measured it.

    python tools/draw_timelines.py predicted.json RUN/tensorboard docs/timeline.png
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

Bars = dict[tuple[int, str], list[tuple[float, float, str]]]  # by rank and lane: begin, milliseconds, name
COLOURS = {"blocks": "#41506b"}
MESSAGES = "#f2a96b"


def predicted(path: Path) -> Bars:
    """The forward pass of a simulated timeline."""
    bars: Bars = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["args"]["pass"] == "forward":
            bars[event["pid"], event["tid"]].append((event["ts"] / 1e3, event["dur"] / 1e3, event["name"]))
    return {lane: sorted(found) for lane, found in bars.items()}


def measured(folder: Path, like: Bars) -> Bars:
    """The last pass in the traces of the ranks that has the blocks and batches of another one."""
    bars: Bars = {}
    for rank in sorted({rank for rank, _ in like}):
        events = json.loads((folder / f"rank{rank}.pt.trace.json").read_text())
        lanes = defaultdict(list)
        for event in events["traceEvents"]:
            lane = event["tid"] if event.get("cat") == "plan" else "blocks"
            if event.get("cat") in ("plan", "user_annotation"):
                begin = (event["ts"] + events.get("baseTimeNanoseconds", 0) / 1e3) / 1e3
                lanes[lane].append((begin, event["dur"] / 1e3, event["name"]))
        for lane in {lane for of, lane in like if of == rank}:
            names = [name for *_, name in like[rank, lane]]
            found = sorted(event for event in lanes[lane] if event[2] in names)
            first = next(
                i for i in reversed(range(len(found))) if [name for *_, name in found[i : i + len(names)]] == names
            )
            bars[rank, lane] = found[first : first + len(names)]
    return bars


def draw(axes: Axes, bars: Bars, title: str) -> None:
    """A row for each rank and lane, from 0."""
    rows = sorted(bars, key=lambda lane: (lane[0], lane[1] != "blocks"))
    start = min(begin for found in bars.values() for begin, *_ in found)
    for row, (rank, lane) in enumerate(rows):
        for begin, length, name in bars[rank, lane]:
            colour = COLOURS.get(lane, MESSAGES)
            axes.barh(row, length, 0.8, begin - start, color=colour, edgecolor="white", linewidth=0.5)
            if lane == "blocks":
                axes.text(begin - start + length / 2, row, name.replace("queries ", "").replace(" keys", ""),
                          ha="center", va="center", color="white", fontsize=7)  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("milliseconds", fontsize=8)


def main(simulated: Path, folder: Path, out: Path) -> None:
    above = predicted(simulated)
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(10, 6.5), sharex=True, layout="constrained")
    draw(top, above, "predicted")
    draw(bottom, measured(folder, above), "measured")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
