"""Draws what docs/images/comparison.json predicts: an overview of the strategies, their speed-up, and their memory."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron.context_parallel.cluster.description import load_cluster

from .compare_strategies import CLUSTER, FILE, HEAD_DIM, HEADS, MEMORY, OVERVIEW, SPEED_UP, specs

GiB = 2**30
NAMES = list(specs(8))
QUANTITIES = {  # of a row: what a picture calls it, its unit, its colour
    "sent": ("Sent by the busiest GPU", "GiB", "#E69F00"),
    "memory": ("Chunks and partials held at once", "GiB", "#009E73"),
    "seconds": ("Time", "ms", "#0072B2"),
}
GREY = "0.45"
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # text that a line would cross
LABELS = 1.4  # times the label below, on the axis of memory
SETTING = (
    f"Predicted, not measured: forward and backward pass, {HEADS} heads of {HEAD_DIM}, bf16, causal, on the cluster "
    f"description {CLUSTER}, which is from data sheets:\n8 H100 a node, {{inside:g}} GB/s inside it, a NIC of "
    "{nic:g} GB/s for each GPU. Heads are split by ulysses over all GPUs, by usp and loongtrain over 8 (4 of 8 GPUs),\n"
    "and by no other strategy."
)
Case = tuple[int, int, int]  # ranks, tokens, key/value heads


def comparison() -> list[dict]:
    return json.loads(FILE.read_text())


def digest() -> str:
    """Of the numbers that the pictures show."""
    return hashlib.sha256(FILE.read_bytes()).hexdigest()[:16]


def overview() -> Figure:
    """A row of panels for each quantity, a column for each number of GPUs."""
    figure, panels = _panels(len(QUANTITIES), len(OVERVIEW), (10.5, 8.6))
    for line, (quantity, (title, unit, colour)) in zip(panels, QUANTITIES.items(), strict=True):
        for axes, case in zip(line, OVERVIEW, strict=True):
            found = _of_case(case)
            values = [_in_unit(found[name].get(quantity), unit) for name in NAMES]
            _bars(axes, values, colour, _short)
            _refused(axes, values)
            if line is panels[0]:
                axes.text(0, -2.1, f"{case[0]} GPUs", fontsize=12, weight="bold")
        line[0].text(0, -0.95, f"{title}, {unit}", fontsize=10.5)
        line[0].set_yticks(range(len(NAMES)), NAMES)
    title = "Eight strategies, one attention of 1M tokens: predicted traffic, memory and time"
    return _titled(figure, title, " Each panel has a scale of its own.")


def speed_up() -> Figure:
    """The time of `ring` over that of each strategy, for two lengths and two numbers of key/value heads."""
    figure, panels = _panels(2, 2, (10.5, 6.4))
    for axes, case in zip((panels[0][0], panels[1][0], panels[0][1], panels[1][1]), SPEED_UP, strict=True):
        found = _of_case(case)
        ring = found["ring"]["seconds"]
        values = [None if "refused" in found[name] else ring / found[name]["seconds"] for name in NAMES]
        _bars(axes, values, QUANTITIES["seconds"][2], lambda value: f"{value:.2f} x")
        _refused(axes, values)
        axes.axvline(1, color="black", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.set_title(f"{_tokens(case[1])} tokens, {case[2]} key/value heads", fontsize=10.5, loc="left")
    for line in panels:
        line[0].set_yticks(range(len(NAMES)), NAMES)
    return _titled(figure, "Predicted speed-up over ring on 64 GPUs")


def memory() -> Figure:
    """A line for each strategy; those that hold the same share one."""
    figure = Figure(figsize=(10.5, 5.6))
    axes = figure.add_axes((0.07, 0.25, 0.77, 0.63))
    lengths = [length for _, length, _ in MEMORY]
    cases = [_of_case(case) for case in MEMORY]
    lines: dict[tuple[float, ...], list[str]] = {}
    for name in NAMES:
        if "refused" not in cases[0][name]:
            held = tuple(case[name]["memory"] / GiB for case in cases)
            alike = next((other for other in lines if abs(other[-1] / held[-1] - 1) < 0.02), held)
            lines.setdefault(alike, []).append(name)
    below = 0.0
    for held, names in sorted(lines.items()):
        below = max(0.85 * held[-1], below * LABELS)
        axes.plot(lengths, held, "o-", color=QUANTITIES["memory"][2], markersize=4, linewidth=1.4)
        axes.text(lengths[-1] * 1.12, below, ", ".join(names), va="center", fontsize=10)
    room = load_cluster(CLUSTER).device.memory_GiB
    axes.axhline(room, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.text(lengths[0], room * 1.1, f"{room:g} GiB: the memory of an H100", fontsize=9, color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks((0.1, 1, 10, 100), ("0.1", "1", "10", "100"))
    axes.set_xticks(lengths, [_tokens(length) for length in lengths])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("GiB that a GPU holds")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return _titled(figure, "What one attention holds at once on 64 GPUs: chunks and partials, predicted")


PICTURES: dict[str, Callable[[], Figure]] = {
    "overview.png": overview,
    "speed-up.png": speed_up,
    "memory.png": memory,
}


def draw_comparison(folder: Path) -> None:
    for name, figure in PICTURES.items():
        figure().savefig(folder / name, dpi=110, metadata={"Description": digest()})


def _of_case(case: Case) -> dict[str, dict]:
    """The rows of a case, by strategy."""
    ranks, tokens, kv_heads = case
    rows = [row for row in comparison() if (row["ranks"], row["tokens"], row["kv_heads"]) == (ranks, tokens, kv_heads)]
    return {row["strategy"]: row for row in rows}


def _panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=size)
    grid = figure.add_gridspec(
        rows, columns, left=0.1, right=0.96, top=1 - 0.95 / size[1], bottom=0.85 / size[1], hspace=0.32, wspace=0.12
    )
    axes = []
    for row in range(rows):
        axes.append([figure.add_subplot(grid[row, column]) for column in range(columns)])
    return figure, axes


def _titled(figure: Figure, title: str, more: str = "") -> Figure:
    FigureCanvasAgg(figure)
    cluster = load_cluster(CLUSTER)
    setting = SETTING.format(inside=cluster.inside.GB_s, nic=cluster.nics.GB_s) + more
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.14 / height, title, fontsize=14, weight="bold", va="top")
    figure.text(0.012, 0.1 / height, setting, fontsize=8.5, color=GREY, linespacing=1.35, va="bottom")
    return figure


def _bars(axes: Axes, values: list[float | None], colour: str, label: Callable[[float], str]) -> None:
    """A bar with its number for each strategy, from the top down; None: none."""
    longest = max(filter(None, values))
    for place, value in enumerate(values):
        if value is not None:
            axes.barh(place, value, height=0.72, color=colour)
            axes.text(value + longest * 0.015, place, label(value), va="center", fontsize=9, bbox=BEHIND)
    axes.set(xlim=(0, longest * 1.2), ylim=(len(values) - 0.5, -0.5), xticks=[], yticks=[])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("0.7")


def _refused(axes: Axes, values: list[float | None]) -> None:
    for place, value in enumerate(values):
        if value is None:
            how = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": GREY, "style": "italic"}
            axes.annotate(f"needs more than {HEADS} heads", (0, place), (4, 0), bbox=BEHIND, **how)


def _in_unit(value: float | None, unit: str) -> float | None:
    return None if value is None else value / GiB if unit == "GiB" else value * 1000


def _short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tokens(length: int) -> str:
    return f"{length >> 20}M" if length >= 2**20 else f"{length >> 10}K"
