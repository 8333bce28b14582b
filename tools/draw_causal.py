"""Draws why the layout matters: a causal ring over contiguous chunks beside one over zigzag chunks."""

import hashlib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatron.context_parallel.plan.ir import Attend, Plan
from megatron.context_parallel.plan.pictures.draw import IDLE
from megatron.context_parallel.plan.trace import Span, trace
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.layout import Chunks

RANKS = 8
LAYOUTS = ("contiguous", "zigzag")
FULL, PART = "#0072B2", "#9ccbea"  # blocks whose pairs are all seen, and others
TOKENS = 16  # of a chunk: enough to count which pairs are seen


def seen(plan: Plan, attend: Attend) -> float:
    """The share of pairs of rows that a causal mask leaves in a block of two chunks; a diagonal counts half."""
    chunks = Chunks.of(plan.layout, plan.n, plan.n * TOKENS)
    (query,), (key,) = attend.q_chunks, attend.kv_chunks
    rows, columns = chunks.positions(query)[:, None], chunks.positions(key)
    return float(((columns < rows).double() + 0.5 * (columns == rows)).mean())


def blocks(layout: str) -> list[Span]:
    """The blocks of a forward ring, each as long as the share of its pairs that is seen. Messages take no time."""
    plan = parse_spec("ring", layout=layout).plan(RANKS)
    run = trace(plan, lambda attend, plan: seen(plan, attend))
    return [span for span in run.spans if not span.channel]


def digest() -> str:
    return hashlib.sha256(repr([blocks(layout) for layout in LAYOUTS]).encode()).hexdigest()[:16]


def draw_causal(path: Path) -> None:
    figure = Figure(figsize=(10.5, 4.9))
    FigureCanvasAgg(figure)
    shown = {layout: blocks(layout) for layout in LAYOUTS}
    longest = max(span.end for spans in shown.values() for span in spans)
    for column, (layout, spans) in enumerate(shown.items()):
        left = 0.065 + 0.5 * column
        owners = figure.add_axes((left, 0.77, 0.43, 0.055))
        lanes = figure.add_axes((left, 0.2, 0.43, 0.48))
        _owners(owners, layout)
        _lanes(lanes, spans, longest)
        finish = max(span.end for span in spans)
        idle = 1 - sum(span.end - span.start for span in spans) / (RANKS * finish)
        lanes.set_title(f"{layout}: done at {finish:g}, ranks idle {idle:.0%} of that time", fontsize=10.5, loc="left")
    handles = [Patch(color=FULL, label="a block that the mask leaves whole")]
    handles += [Patch(color=PART, label="one that it cuts"), Patch(label="idle", **IDLE)]
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=9, frameon=False)
    title = f"A causal ring of {RANKS} ranks, forward: the layout decides who waits"
    figure.text(0.012, 0.965, title, fontsize=14, weight="bold", va="top")
    figure.savefig(path, dpi=110, metadata={"Description": digest()})


def _owners(axes: Axes, layout: str) -> None:
    """The sequence from left to right, and which rank holds each part of it."""
    slices = 2 * RANKS
    for rank, chunk in enumerate(Chunks.of(layout, RANKS, slices).progressions):
        for place in [place for run in chunk for place in range(run.start, run.last + 1, run.stride)]:
            axes.add_patch(Rectangle((place, 0), 1, 1, facecolor="0.93", edgecolor="white"))
            axes.text(place + 0.5, 0.47, str(rank), ha="center", va="center", fontsize=8.5)
    axes.set(xlim=(0, slices), ylim=(0, 1))
    axes.axis("off")
    axes.set_title(
        "which rank holds which part of the sequence, from its first token to its last", fontsize=8.5, loc="left"
    )


def _lanes(axes: Axes, spans: list[Span], longest: float) -> None:
    """A lane of blocks for each rank; the rest of the time it is idle."""
    finish = max(span.end for span in spans)
    for rank in range(RANKS):
        axes.add_patch(Rectangle((0, rank - 0.42), finish, 0.84, **IDLE))
    for span in spans:
        (block,) = span.what
        long = span.end - span.start
        colour = FULL if long == 1 else PART
        axes.add_patch(Rectangle((span.start, span.rank - 0.42), long, 0.84, facecolor=colour, edgecolor="white"))
        text = f"{block.q_chunks[0]},{block.kv_chunks[0]}"
        axes.text(
            (span.start + span.end) / 2, span.rank, text, ha="center", va="center", fontsize=7,
            color="white" if long == 1 else "black",
        )  # fmt: skip
    axes.set(xlim=(0, longest), ylim=(RANKS - 0.5, -0.5))
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("time; a whole block takes 1, and its label is query chunk, key/value chunk", fontsize=8.5)
