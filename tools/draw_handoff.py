"""Draws how a prompt gets from our ranks into vLLM, for docs/vllm.md: who sends what, and when."""

import hashlib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

RANKS, CHUNKS = 4, 4
SENDING = 0.55  # of the time of a chunk
BLUE, ORANGE, GREY, EDGE = "#d3e7f5", "#f7d9c4", "#f0f0f0", "#41506b"
BOXES = {  # left, bottom, width, height, colour
    "client": (0.0, 1.25, 1.1, 0.8, GREY),
    "proxy": (2.3, 1.25, 1.1, 0.8, GREY),
    "vLLM": (4.8, 0.0, 1.6, 0.8, ORANGE),
}
ARROWS = [  # begin, end, number, what is sent, its place
    ((1.15, 1.75), (2.25, 1.75), "1", "a request", (1.7, 2.02)),
    ((2.9, 2.1), (4.75, 3.1), "2", "its prompt", (3.2, 2.95)),
    ((4.75, 2.85), (3.4, 2.1), "3", "a ticket", (4.55, 2.22)),
    ((3.1, 1.2), (4.75, 0.4), "4", "the request,\nwith the ticket", (3.05, 0.5)),
    ((2.25, 1.45), (1.15, 1.45), "6", "the text", (1.7, 1.18)),
]
SERVER = 4.8, 2.4, 4.4, 1.1, BLUE
ROWS = "5", "keys and values\nof all ranks", (8.2, 1.3)


def digest() -> str:
    """Of all that the picture shows."""
    shown = RANKS, CHUNKS, SENDING, BOXES, SERVER, ARROWS, ROWS
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def draw_handoff(path: Path) -> None:
    figure_of_the_handoff().savefig(path, dpi=110, metadata={"Description": digest()})


def figure_of_the_handoff() -> Figure:
    """On the left who sends what, on the right when the ranks compute and send."""
    figure = Figure(figsize=(13, 3.6))
    FigureCanvasAgg(figure)
    flow, times = figure.add_axes((0, 0, 0.62, 1)), figure.add_axes((0.64, 0, 0.36, 1))
    for axes in (flow, times):
        axes.axis("off")
    _draw_flow(flow)
    _draw_times(times)
    return figure


def _draw_flow(axes: Axes) -> None:
    for name, (left, bottom, width, height, colour) in BOXES.items():
        _box(axes, left, bottom, width, height, colour, name)
    _box(axes, *SERVER, "")
    axes.text(5.65, 2.95, "prefill server", ha="center", va="center", fontsize=9)
    for rank in range(RANKS):
        left = 6.6 + 0.65 * rank
        _box(axes, left, 2.55, 0.5, 0.8, "white", f"rank\n{rank}")
        end = 5.2 + 0.3 * rank, 0.85
        axes.annotate("", end, (left + 0.25, 2.5), arrowprops={"arrowstyle": "-|>", "color": "#c25a10"})
    for begin, end, number, what, place in ARROWS:
        axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": EDGE})
        _label(axes, number, what, place)
    _label(axes, *ROWS)
    axes.set(xlim=(-0.2, 9.3), ylim=(-0.3, 3.7))


def _draw_times(axes: Axes) -> None:
    """The ranks compute a chunk of the prompt while they send the rows of the one before."""
    names = ["ranks compute", "ranks send rows", "vLLM decodes"]
    for row, name in enumerate(names):
        axes.text(-0.15, -row, name, ha="right", va="center", fontsize=9)
    for chunk in range(CHUNKS):
        _box(axes, chunk + 0.02, -0.3, 0.96, 0.6, BLUE, f"chunk {chunk + 1}")
        _box(axes, chunk + 1.02, -1.3, SENDING, 0.6, ORANGE, str(chunk + 1))
    first_token = CHUNKS + SENDING
    _box(axes, first_token + 0.07, -2.3, 0.9, 0.6, ORANGE, "text")
    axes.annotate("", (first_token + 1, -2.75), (0, -2.75), arrowprops={"arrowstyle": "-|>", "color": EDGE})
    axes.text(first_token + 1, -2.95, "time", ha="right", va="top", fontsize=9)
    axes.set(xlim=(-2.0, first_token + 1.1), ylim=(-3.3, 0.7))


def _box(axes: Axes, left: float, bottom: float, width: float, height: float, colour: str, text: str) -> None:
    how = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": colour, "edgecolor": EDGE}
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, **how))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=9)


def _label(axes: Axes, number: str, what: str, place: tuple[float, float]) -> None:
    axes.text(*place, f"{number}: {what}", ha="center", va="center", fontsize=9)
