"""Pictures of a plan: which rank computes which pair of chunks, and when each rank computes and communicates."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, Rectangle
from matplotlib.textpath import text_to_path

from megatron.context_parallel.plan.ir import Plan, T

from .lanes import BLOCKS, MEANING, MESSAGE, Bar, Idle, Picture, picture

BLOCK = "#41506b"
COLOURS = {  # at least 17 apart in CIE Lab, also for colour-blind readers (Machado 2009)
    T.Q: "#5aa9e6",
    T.QDO: "#5aa9e6",
    T.DO: "#cfeafa",
    T.KV: "#e69f00",
    T.O: "#8fd8a8",
    T.DQ: "#8fd8a8",
    T.DKV: "#d186b0",
}
RANKS = [to_hex(0.4 + 0.6 * colour) for colour in matplotlib.colormaps["tab20"](range(20))[:, :3]]  # legible text
IDLE: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.75", "hatch": "/////", "linewidth": 0.0}
_NUMBERED = 16  # with more ranks the cells are too small for text
_STEPS = 9  # with more ranks they are too small for steps
_WIDTH, _MATRIX, _LEFT, _TIMELINE, _RIGHT, _TOP, _BOTTOM = 12.0, 3.3, 0.55, 5.0, 0.15, 0.65, 0.5  # inches
_LANE, _TALLEST = 0.17, 12.0  # inches: a lane, and the maximum for all lanes
_GAP = 0.6  # between ranks, in lanes


def file_name(spec: str, ranks: int, backward: bool) -> str:
    """The name of a picture, without its suffix: `mesh-grid-2x4-8-ranks-forward`."""
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', spec)}-{ranks}-ranks-{'backward' if backward else 'forward'}"


def draw(plan: Plan, path: Path | str, transfer_time: float = MESSAGE) -> None:
    """Writes the assignment matrix and the timeline of `plan` to `path` (.png or .svg).

    Each rank has a lane for its blocks and one for each channel. A pair of chunks takes one unit of time and a
    message `transfer_time` units. The file's `Description` is the `digest` of the picture.
    """
    shown = picture(plan, transfer_time)
    figure_of(shown).savefig(path, dpi=120, metadata={"Title": shown.title, "Description": shown.digest})


def figure_of(shown: Picture, until: float = math.inf) -> Figure:
    """The figure that `draw` writes. With `until`, bars that begin later are left out."""
    lanes = shown.ranks * (len(shown.lanes) + _GAP)
    lanes_high = max(min(_LANE * lanes, _TALLEST), _MATRIX + 2.2)
    height = _TOP + lanes_high + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    matrix = figure.add_axes(_box(height, _LEFT, height - _TOP - _MATRIX, _MATRIX, _MATRIX))
    timeline = figure.add_axes(_box(height, _TIMELINE, _BOTTOM, _WIDTH - _TIMELINE - _RIGHT, lanes_high))
    begun = [bar for bar in shown.bars if bar.start < until]
    _assignment(matrix, shown, begun)
    _timeline(timeline, shown, begun, [gap for gap in shown.idle if gap.start < until], lanes_high / lanes)
    _legend(figure, shown, (_LEFT / _WIDTH, (height - _TOP - _MATRIX - 0.55) / height))
    figure.suptitle(shown.title, x=_LEFT / _WIDTH, y=1 - 0.12 / height, ha="left", va="top", fontsize=13)
    return figure


def _box(height: float, left: float, bottom: float, wide: float, high: float) -> tuple[float, float, float, float]:
    return left / _WIDTH, bottom / height, wide / _WIDTH, high / height


def _assignment(axes: Axes, shown: Picture, bars: Sequence[Bar]) -> None:
    n = shown.ranks
    size = min(9, 0.45 * _MATRIX * 72 / n)
    first = {pair: bar for bar in reversed(bars) for pair in bar.pairs}  # rounds compute a pair several times
    for (q, kv), bar in first.items():
        cell = (kv - 0.5, q - 0.5), 1, 1
        axes.add_patch(
            Rectangle(*cell, facecolor=RANKS[bar.rank % len(RANKS)], edgecolor="white", linewidth=min(1, 16 / n))
        )
        if n <= _NUMBERED:
            axes.text(kv, q - 0.05, f"{bar.rank}", ha="center", va="center", fontsize=size)
        if n <= _STEPS:
            axes.text(kv + 0.45, q + 0.46, f"s{bar.step}", ha="right", va="bottom", fontsize=5.5, color="0.2")
    ticks = range(n) if n <= _NUMBERED else range(0, n, 8)
    axes.set(xticks=ticks, yticks=ticks, xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5))
    axes.set_xlabel("key/value chunk", fontsize=9)
    axes.set_ylabel("query chunk", fontsize=9)
    axes.set_title("rank (and step s) of each pair" if n <= _STEPS else "rank of each pair", fontsize=10)
    axes.tick_params(labelsize=8, length=2)
    axes.set_facecolor("0.94")


def _timeline(axes: Axes, shown: Picture, bars: Sequence[Bar], idle: Sequence[Idle], lane: float) -> None:
    """`lane`: inches between lanes."""
    n = shown.ranks
    lanes = len(shown.lanes)
    pitch = lanes + _GAP
    inches = _WIDTH - _TIMELINE - _RIGHT
    size = min(7.0, 0.66 * 72 * lane)
    for rank in range(n):
        axes.axhspan(rank * pitch - 0.5, rank * pitch + lanes - 0.5, color="0.955", linewidth=0, zorder=0)
    for rank, start, end in idle:
        axes.add_patch(Rectangle((start, rank * pitch - 0.46), end - start, 0.92, **IDLE))
    for bar in bars:
        y = bar.rank * pitch + bar.lane
        length = bar.end - bar.start
        colour = COLOURS[bar.tensor] if bar.tensor else BLOCK
        axes.add_patch(
            Rectangle((bar.start, y - 0.46), length, 0.92, facecolor=colour, edgecolor="white", linewidth=0.6)
        )
        if n <= _NUMBERED and (text := _fitting(bar, length / shown.finish * inches * 72 - 2, size)):
            middle = (bar.start + bar.end) / 2, y + 0.04
            axes.text(*middle, text, ha="center", va="center", fontsize=size, color="black" if bar.tensor else "white")
    numbered = range(n) if n <= _NUMBERED else range(0, n, 8)
    axes.set(xlim=(0, shown.finish), ylim=((n - 1) * pitch + lanes - 0.4, -0.6))
    axes.set_yticks([r * pitch + (lanes - 1) / 2 for r in numbered], [f"rank {r}" for r in numbered], fontsize=9)
    axes.tick_params(axis="y", length=0, pad=_lane_width(shown, size) + 10 if n <= _NUMBERED else 4)
    if n <= _NUMBERED:
        axes.yaxis.remove_overlapping_locs = False  # a middle lane has its label next to the rank's
        axes.set_yticks([r * pitch + i for r in range(n) for i in range(lanes)], minor=True)
        axes.set_yticklabels(list(shown.lanes) * n, minor=True, fontsize=size, color="0.35")
        axes.tick_params(axis="y", which="minor", length=0, pad=3)
    axes.set_xticks([t for t in axes.get_xticks() if t <= shown.finish])
    axes.tick_params(axis="x", labelsize=8, length=2)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(f"time (block of a pair of chunks: 1, message: {shown.transfer_time:g})", fontsize=9)
    share = sum(gap.end - gap.start for gap in shown.idle) / (n * shown.finish)
    axes.set_title(f"blocks and messages of each rank; ranks are idle {share:.0%} of the time", fontsize=10)


def _fitting(bar: Bar, points: float, size: float) -> str:
    """The longest text of a bar that fits into `room` points."""
    return next((text for text in bar.texts if _text_width(text, size) <= points), "")


def _text_width(text: str, size: float) -> float:
    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0]


def _lane_width(shown: Picture, size: float) -> float:
    return max(_text_width(lane, size) for lane in shown.lanes)


def _legend(figure: Figure, shown: Picture, corner: tuple[float, float]) -> None:
    colours = {BLOCK: f"{BLOCKS}: query chunk, key/value chunk"}
    colours |= {COLOURS[t]: f"{t}: {MEANING[t]}" for t in shown.tensors}
    handles = [Patch(facecolor=colour, label=label) for colour, label in colours.items()]
    if shown.idle:
        handles.insert(1, Patch(label="idle: no block to compute", **IDLE))
    message = next((bar for bar in shown.bars if len(bar.texts) == 3 and bar.sent), None)
    if message and shown.ranks <= _NUMBERED:
        (sent,) = message.sent
        long, short, _ = message.texts
        how = f"{long}, {short} or {sent.chunk}: chunk {sent.chunk} to rank {sent.receiver}"
        handles.append(Patch(facecolor="none", label=how))
    if shown.ranks <= _STEPS:
        handles.append(Patch(facecolor="none", label="s3: in step 3 of the rank, counted from 0"))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=corner, fontsize=8, frameon=False, borderaxespad=0)
