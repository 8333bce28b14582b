"""Draws what each rank computes and which keys it needs, for several distributions of the tokens side by side."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron.context_parallel.plan.ir import T
from megatron.context_parallel.tokens.chunk_loads import ChunkLoads

from .draw import BLOCK, COLOURS

_SIDE, _HIGH = 3.0, 4.6  # inches: of a column, and of the picture


def draw_loads(loads: dict[str, ChunkLoads], tokens: int, path: Path | str) -> None:
    """Writes a column for each named distribution of `tokens` tokens to `path` (.png or .svg).

    Above: the keys of each chunk that each other chunk sees, black where it sees all. Below: the work of each rank,
    and the keys that it receives.
    """
    figure = Figure(figsize=(_SIDE * len(loads), _HIGH), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(loads), height_ratios=(3, 1.4), sharex="col", sharey="row", squeeze=False)
    for column, (name, of_ranks) in enumerate(loads.items()):
        _draw_keys(axes[0, column], name, of_ranks, tokens)
        _draw_bars(axes[1, column], of_ranks, tokens)
    axes[0, 0].set_ylabel("query chunk", fontsize=9)
    axes[1, 0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=120, metadata={"Title": "work and keys of each rank"})


def _draw_keys(axes: Axes, name: str, loads: ChunkLoads, tokens: int) -> None:
    of_chunk = tokens / len(loads.pairs)
    axes.imshow(loads.rows / of_chunk, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    axes.set_title(f"{name}: {loads.pairs.max() / loads.pairs.mean():.2f} of the mean work", fontsize=10)
    axes.set_xlabel("key/value chunk", fontsize=9)
    axes.tick_params(labelsize=8, length=2)


def _draw_bars(axes: Axes, loads: ChunkLoads, tokens: int) -> None:
    ranks = np.arange(len(loads.pairs))
    work, received = loads.pairs / loads.pairs.mean(), loads.rows.sum(1) / tokens
    axes.bar(ranks - 0.2, work, 0.4, color=BLOCK, label="work, of the mean")
    axes.bar(ranks + 0.2, received, 0.4, color=COLOURS[T.KV], label="received, of all keys")
    axes.set_xlabel("rank", fontsize=9)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
