"""Pictures of a plan: who computes which pair of chunks, and when each rank computes and communicates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .ir import AllGather, Plan, Recv, ReduceScatter, Send, SwapHeads
from .machine import Span
from .trace import trace

_NUMBERED = 16  # with more ranks the cells are too small for text


def draw(plan: Plan, path: Path | str, transfer_time: float = 0.5) -> None:
    """Writes the assignment matrix and the per-rank timeline of `plan` to `path` (.png or .svg).

    In the timeline a pair of chunks takes one unit of time and a message `transfer_time` units.
    """
    run = trace(plan, transfer_time=lambda transfer: transfer_time * transfer.share)
    figure = Figure(figsize=(13, max(4.5, min(10, 2 + 0.45 * plan.n))), layout="constrained")
    matrix, timeline = figure.subplots(1, 2, width_ratios=(1, 1.6))
    colours = [matplotlib.colormaps["tab20"](r % 20) for r in range(plan.n)]
    _assignment(matrix, plan, run.spans, colours)
    _timeline(timeline, plan, run.spans)
    direction = "backward" if plan.backward else "forward"
    ranks = f"{plan.n} ranks"
    if plan.heads > 1:
        ranks = f"{plan.n} of {plan.size} ranks, for 1/{plan.heads} of the heads"
    figure.suptitle(f"{plan.name}, {ranks}, {plan.layout} layout, {direction}")
    figure.savefig(path, dpi=120)


def _blocks(plan: Plan, spans: Sequence[Span]) -> list[tuple[Span, list[tuple[int, int]]]]:
    return [(span, list(span.what[0].pairs(plan.sees))) for span in spans if not span.channel]


def _assignment(axes: Axes, plan: Plan, spans: Sequence[Span], colours: list) -> None:
    for span, pairs in _blocks(plan, spans):
        for q, kv in pairs:
            axes.add_patch(
                matplotlib.patches.Rectangle((kv - 0.5, q - 0.5), 1, 1, facecolor=colours[span.rank], edgecolor="white")
            )
            if plan.n <= _NUMBERED:
                axes.text(kv, q, f"{span.rank}", ha="center", va="center", fontsize=9)
                axes.text(kv + 0.45, q + 0.42, f"s{span.step}", ha="right", va="bottom", fontsize=6, color="0.25")
    ticks = range(plan.n) if plan.n <= _NUMBERED else range(0, plan.n, 8)
    axes.set(
        xticks=ticks,
        yticks=ticks,
        xlim=(-0.5, plan.n - 0.5),
        ylim=(plan.n - 0.5, -0.5),
        xlabel="key/value chunk",
        ylabel="query chunk",
        aspect="equal",
        title="rank that computes each pair (and in which step)",
    )
    axes.set_facecolor("0.93")


def _timeline(axes: Axes, plan: Plan, spans: Sequence[Span]) -> None:
    for span, pairs in _blocks(plan, spans):
        if pairs:
            box: dict[str, Any] = {"facecolor": "tab:blue", "edgecolor": "white"}
            axes.broken_barh([(span.start, span.end - span.start)], (span.rank - 0.4, 0.5), **box)
            if plan.n <= _NUMBERED:
                label = f"{pairs[0][0]},{pairs[0][1]}" if len(pairs) == 1 else f"{len(pairs)} pairs"
                middle = (span.start + span.end) / 2
                axes.text(middle, span.rank - 0.15, label, ha="center", va="center", fontsize=7, color="white")
    for span in spans:
        if span.channel and span.end > span.start:
            axes.broken_barh(
                [(span.start, span.end - span.start)],
                (span.rank + 0.12, 0.26),
                facecolor="tab:orange",
                edgecolor="white",
            )
            if plan.n <= _NUMBERED:
                middle = (span.start + span.end) / 2
                axes.text(middle, span.rank + 0.25, _say(span.what), ha="center", va="center", fontsize=6)
    axes.set(
        ylim=(plan.n - 0.4, -0.6),
        yticks=range(plan.n) if plan.n <= _NUMBERED else range(0, plan.n, 8),
        xlabel="time (one pair of chunks = 1)",
        ylabel="rank",
        title="blocks (blue: query, key chunk) over communication (orange)",
    )


def _say(ops: tuple) -> str:
    words = []
    sends = any(isinstance(op, Send) for op in ops)
    for op in ops:
        match op:
            case Send():
                words.append(f"{op.tensor}{op.chunk}→{op.peer}")
            case Recv() if not sends:  # otherwise too much to read, and its sender says it
                words.append(f"{op.tensor}{op.chunk}←{op.peer}")
            case AllGather():
                words.append(f"gather {op.tensor}")
            case ReduceScatter():
                words.append(f"reduce-scatter {op.tensor}")
            case SwapHeads():
                words.append(f"swap heads {' '.join(op.tensors)}")
    return " ".join(words)
