"""Draws how inference works, for docs/inference.md: a layer of a decode step, and the steps of an engine."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel.inference.engine import Engine, Request
from megatron.context_parallel.inference.pages import PageTables
from megatron.context_parallel.inference.tokenizer import ByteTokenizer

STEP, ENGINE = "decode-step.png", "engine-steps.png"
VOCABULARY = 8
REQUESTS = [(28, 12), (6, 14), (60, 6), (9, 5), (20, 4)]  # tokens of the prompt and of the text
COLOURS = {"waits": "#e4e4e4", "prompt": "#56b4e9", "text": "#e69f00"}
STAGES = [  # of a layer: its name, what it does, whether it is a collective
    ("linear", "norm, QKV, RoPE\nof own rows", False),
    ("store", "own keys and values\ninto own pages", False),
    ("all-gather", "queries\nof all rows", True),
    ("attend", "all queries\nto own pages", False),
    ("all-to-all", "partial outputs,\nlog-sum-exp", True),
    ("merge", "n parts\nof own rows", False),
    ("linear", "projection, MLP\nof own rows", False),
]


class Cache:
    """A cache whose text is always the same. It notes the tokens of each step by request; 0 if a request waits."""

    vocabulary, window = VOCABULARY, None
    engine: Engine

    def __init__(self) -> None:
        self.tables = PageTables(1, 24, 4)
        self.steps: list[dict[str, int]] = []

    def open(self) -> int:
        return self.tables.open()

    def fork(self, sequence: int, tokens: int) -> int:
        return self.tables.fork(sequence, tokens)[0]

    def free(self, sequence: int) -> None:
        self.tables.free(sequence)

    def holds(self, sequence: int, tokens: int) -> bool:
        return True

    def room(self) -> int:
        return self.tables.room()

    def can_copy(self) -> bool:
        return self.tables.can_copy()

    def forward(self, new: Mapping[int, Sequence[int]], prefill=None, scored=()) -> dict[int, torch.Tensor]:
        step = {waiting.request.name: 0 for waiting in self.engine.waiting}
        for name, run in self.engine.running.items():
            step[name] = len(new.get(run.sequence, ()))
        self.steps.append(step)
        self.tables.add({sequence: len(tokens) for sequence, tokens in new.items()})
        return {sequence: torch.arange(float(VOCABULARY)) for sequence in new}

    def share(self, values: Mapping[int, Sequence[float]], width: int = 1) -> dict[int, list[float]]:
        return {sequence: [*numbers] for sequence, numbers in values.items()}


@cache
def steps() -> list[dict[str, int]]:
    """The tokens of each request in each step of an engine."""
    shown = Cache()
    shown.engine = Engine(shown, ByteTokenizer(1), chunks=16)
    for i, (prompt, text) in enumerate(REQUESTS):
        params = SamplingParams(num_tokens_to_generate=text, top_k=1)
        shown.engine.add(Request(str(i), [i + 2] * prompt, params, key=str(i)))
    while not shown.engine.idle:
        shown.engine.step()
    return shown.steps


def digest() -> str:
    return hashlib.sha256(repr((STAGES, steps())).encode()).hexdigest()[:16]


def draw_inference(folder: Path) -> None:
    for name, figure in ((STEP, figure_of_a_step()), (ENGINE, figure_of_an_engine())):
        figure.savefig(folder / name, dpi=110, metadata={"Description": digest()})


def figure_of_a_step() -> Figure:
    """The stages of a layer from left to right, for two ranks."""
    figure, axes = _empty(11, 2.7)
    for rank in range(2):
        axes.text(0, -rank, f"rank {rank}", ha="right", va="center")
    for place, (name, what, collective) in enumerate(STAGES):
        left = 0.15 + 1.45 * place
        height = 1.76 if collective else 0.76
        for rank in (0,) if collective else (0, 1):
            colour = "#f7d9c4" if collective else "#d3e7f5"
            bottom = -1.38 if collective else -rank - 0.38
            how = {"boxstyle": "round,pad=0.03", "facecolor": colour, "edgecolor": "#41506b"}
            axes.add_patch(FancyBboxPatch((left, bottom), 1.2, height, **how))
            axes.text(left + 0.6, bottom + height / 2, f"{name}\n\n{what}", ha="center", va="center", fontsize=8)
        if place:
            for rank in (0, 1):
                axes.annotate("", (left - 0.03, -rank), (left - 0.22, -rank), arrowprops={"arrowstyle": "-|>"})
    axes.set(xlim=(-0.6, 10.3), ylim=(-1.55, 0.55))
    return figure


def figure_of_an_engine() -> Figure:
    """A row for each request, a column for each step."""
    figure, axes = _empty(11, 2.6)
    for row, (prompt, text) in enumerate(REQUESTS):
        axes.text(-0.3, -row, f"{prompt} + {text} tokens", ha="right", va="center", fontsize=9)
        left = prompt
        for column, step in enumerate(steps()):
            if (tokens := step.get(str(row))) is None:
                continue
            kind = "waits" if not tokens else "prompt" if left > 0 else "text"
            left -= tokens
            axes.add_patch(Rectangle((column, -row - 0.4), 0.94, 0.8, facecolor=COLOURS[kind]))
            axes.text(column + 0.47, -row, str(tokens or ""), ha="center", va="center", fontsize=8)
    for place, (name, colour) in enumerate(COLOURS.items()):
        axes.add_patch(Rectangle((5 * place, 0.75), 0.6, 0.4, facecolor=colour))
        axes.text(5 * place + 0.8, 0.95, name, va="center", fontsize=9)
    axes.text(len(steps()), 0.95, "steps", ha="right", va="center", fontsize=9)
    axes.set(xlim=(-4, len(steps()) + 0.2), ylim=(-len(REQUESTS) + 0.4, 1.3))
    return figure


def _empty(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    return figure, axes
