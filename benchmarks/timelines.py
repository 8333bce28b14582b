"""Draws a predicted pass above the same pass of a profiled run, with a lane for the blocks and each channel of a rank.

    python tools/plan.py mesh --ranks 4 --seq-length 4096 --cluster cluster.yaml --timeline predicted.json
    PYTHONPATH=. python benchmarks/timelines.py predicted.json runs/profiled/rank*.pt.trace.json --output timelines.png

The first is what `tools/plan.py --timeline` wrote, the others are traces of `--profile --use-pytorch-profiler`. The
forward pass of the first layer is drawn.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.pictures.lanes import BLOCKS

PASS = "forward"
Lanes = dict[tuple[int, str], list["Span"]]  # by rank and lane, in the order of their start


class Span(NamedTuple):
    """A block, or a batch of a channel; milliseconds."""

    name: str
    begin: float
    end: float


def predicted(path: Path) -> Lanes:
    """The forward pass of a simulated timeline."""
    lanes: Lanes = defaultdict(list)
    for event in _events(path)[1]:
        if event["ph"] == "X" and event["args"]["pass"] == PASS:
            lanes[event["pid"], event["tid"]].append(_span(event, 0))
    if not lanes:
        raise UsageError(f"{path}: has no {PASS} pass; give a file of tools/plan.py --cluster NAME --timeline FILE")
    return _from_zero(lanes)


def measured(paths: list[Path], like: Lanes) -> Lanes:
    """The first pass of each rank that has the spans of `like`, in the same lanes."""
    found: Lanes = defaultdict(list)
    for path in paths:
        since, events = _events(path)
        rank = int(path.name.removeprefix("rank").split(".")[0])
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"].startswith("queries "):
                found[rank, BLOCKS].append(_span(event, since))
            elif event.get("cat") == "plan":
                found[rank, event["tid"]].append(_span(event, since))
    first = {lane: sorted(found[lane], key=lambda span: span.begin)[: len(spans)] for lane, spans in like.items()}
    for lane, spans in like.items():
        names = sorted(span.name for span in spans)
        if sorted(span.name for span in first[lane]) != names:
            raise UsageError(
                f"rank {lane[0]}, {lane[1]}: other blocks or messages than predicted; give the same strategy"
            )
    return _from_zero(first)


def _events(path: Path) -> tuple[float, list[dict]]:
    """When the clock of a trace starts, in milliseconds, and its events."""
    trace = json.loads(path.read_text())
    return trace.get("baseTimeNanoseconds", 0) / 1e6, trace["traceEvents"]


def _span(event: dict, since: float) -> Span:
    begin = since + float(event["ts"]) / 1e3
    return Span(event["name"], begin, begin + float(event["dur"]) / 1e3)


def _from_zero(lanes: Lanes) -> Lanes:
    zero = min(span.begin for spans in lanes.values() for span in spans)
    moved = {}
    for lane, spans in lanes.items():
        moved[lane] = [Span(s.name, s.begin - zero, s.end - zero) for s in spans]
    return moved


def draw(passes: dict[str, Lanes], path: Path) -> None:
    """The passes below each other, on one time axis."""
    lanes = sorted(next(iter(passes.values())))
    channels = sorted({lane for _, lane in lanes}, key=lambda lane: (lane != BLOCKS, lane))
    colours = dict(zip(channels, ("#8db8e8", "#f2a96b", "#74c69a", "#c3a6e0", "#e8d27a"), strict=False))
    figure = Figure(figsize=(10, 1 + 0.22 * len(lanes) * len(passes)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(passes), sharex=True)
    for axes, (title, found) in zip(rows, passes.items(), strict=True):
        last = max(span.end for spans in found.values() for span in spans)
        for y, lane in enumerate(lanes):
            widths = [(span.begin, span.end - span.begin) for span in found[lane]]
            axes.broken_barh(widths, (y - 0.4, 0.8), facecolor=colours[lane[1]], edgecolor="white", linewidth=0.5)
        axes.set(title=f"{title}: {last:.0f} ms", ylim=(len(lanes) - 0.5, -0.5))
        axes.set_yticks(range(len(lanes)), [f"rank {rank}, {lane}" for rank, lane in lanes], fontsize=7)
    rows[-1].set_xlabel("ms")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("predicted", type=Path)
    parser.add_argument("traces", type=Path, nargs="+", help="rank0.pt.trace.json, ...: of all ranks")
    parser.add_argument("--output", type=Path, default=Path("timelines.png"), help="default: %(default)s")
    args = parser.parse_args()
    above = predicted(args.predicted)
    draw({"predicted": above, "measured": measured(args.traces, above)}, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_main(main)
