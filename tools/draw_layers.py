"""Draws the layers of the package, and which of them a batch and a prompt pass, as docs/architecture.md tells it."""

import hashlib
import re
import tomllib
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
CORE = "attention"  # this layer and those below it need torch and numpy only
WIDE, NAME, TEXT = 10.6, 1.45, 5.95  # inches: all, a name, what it does
COLOURS = {"core": "#d3e7f5", "above": "#f0f0f0"}
PATHS = {  # heading of the page: title of its column, colour of its numbers
    "A batch through a training step": ("a batch", "#0072B2"),
    "A prompt through the server": ("a prompt", "#D55E00"),
}


def layers() -> list[str]:
    """As import-linter checks them, the highest first; with " | " those that do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return contracts[0]["layers"]


def purposes() -> list[str]:
    """What each layer is for, as the page says it."""
    block = PAGE.read_text().split("```text\n")[1].split("```")[0]
    return [re.split("  +", line)[1] for line in block.splitlines()]


def passed(heading: str) -> dict[str, list[int]]:
    """For each folder the numbers of the steps, below a heading of the page, that name a file of it."""
    found = defaultdict[str, list[int]](list)
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    for number, step in re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", section, re.MULTILINE):
        for folder in dict.fromkeys(re.findall(r"`(\w+)/", step)):
            found[folder].append(int(number))
    return found


def digest() -> str:
    shown = layers(), purposes(), [passed(heading) for heading in PATHS]
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def figure_of_layers() -> Figure:
    """A row for each layer, and the steps that pass it on the right."""
    names = layers()
    figure = Figure(figsize=(WIDE, 0.36 * len(names) + 0.85))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDE), ylim=(len(names) + 0.75, -1.55))
    axes.axis("off")
    for row, (layer, purpose) in enumerate(zip(names, purposes(), strict=True)):
        kind = "core" if row >= names.index(CORE) else "above"
        _row(axes, row, layer.split(" | "), purpose.split(" | "), COLOURS[kind])
    for column, (heading, (title, colour)) in enumerate(PATHS.items()):
        _path(axes, NAME + TEXT + 0.45 + 1.2 * column, title, colour, passed(heading))
    axes.annotate(
        "", (0.22, len(names) - 0.6), (0.22, -0.4), arrowprops={"arrowstyle": "-|>", "color": "0.35", "linewidth": 1.2}
    )
    axes.text(0.12, len(names) / 2, "imports", rotation=90, ha="center", va="center", fontsize=9, color="0.35")
    axes.text(0.4, -1, "The layers of megatron/context_parallel", fontsize=13, weight="bold", va="center")
    note = "blue: needs torch and numpy only        numbers: the steps of the two lists on this page"
    axes.text(0.4, len(names) + 0.2, note, fontsize=9, color="0.35", va="center")
    return figure


def draw_layers(path: Path) -> None:
    figure_of_layers().savefig(path, dpi=110, metadata={"Description": digest()})


def _row(axes: Axes, row: int, names: list[str], purposes: list[str], colour: str) -> None:
    """The boxes of a layer; two side by side share its width."""
    wide = (NAME + TEXT) / len(names)
    alone = len(names) == 1
    round_corners = "round,pad=0,rounding_size=0.06"
    for i, (name, purpose) in enumerate(zip(names, purposes, strict=True)):
        left = 0.4 + i * wide
        corner = left, row - 0.4
        axes.add_patch(FancyBboxPatch(corner, wide - 0.06, 0.8, round_corners, facecolor=colour, edgecolor="none"))
        axes.text(left + 0.12, row, name, fontsize=10.5, weight="bold", va="center")
        indent = NAME if alone else 0.92 + 0.18 * i
        axes.text(left + indent, row, purpose, fontsize=8.2 if alone else 7.8, va="center")


def _path(axes: Axes, left: float, title: str, colour: str, steps: dict[str, list[int]]) -> None:
    """The numbers of the steps beside the layers whose files they name."""
    axes.text(left, -1, title, fontsize=10.5, weight="bold", color=colour, va="center")
    circle = {"boxstyle": "circle,pad=0.25", "facecolor": colour, "edgecolor": "none"}
    how = {"fontsize": 9, "weight": "bold", "color": "white", "ha": "center", "va": "center", "bbox": circle}
    for row, layer in enumerate(layers()):
        numbers = [number for name in layer.split(" | ") for number in steps.get(name, [])]
        for i, number in enumerate(numbers):
            axes.text(left + 0.12 + 0.3 * i, row, str(number), **how)
