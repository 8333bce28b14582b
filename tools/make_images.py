"""Draws the plans and the cache that the documentation shows, into docs/images. Run it after a change of these."""

from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from megatron.context_parallel.inference.pages import PageTables
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.pictures.draw import draw, figure_of, file_name
from megatron.context_parallel.plan.pictures.lanes import picture
from megatron.context_parallel.strategies import parse_spec

FOLDER = Path(__file__).parents[1] / "docs" / "images"
# (spec, ranks); each is drawn forward and backward
IMAGES = (
    ("ring", 8),
    ("ring:layout=contiguous", 8),
    ("allgather", 8),
    ("usp:head_parallel_size=2", 8),
    ("loongtrain:inner_ring_size=4", 8),
    ("attention2d:grid=3x3", 9),
    ("mesh:grid=3x3", 9),
    ("lightseq", 8),
)
CACHE = "cache-4-ranks.png"
MOVING = "mesh-grid-3x3-9-ranks.gif"
MILLISECONDS = 500  # of a frame, in which a message travels
LAST = 3000  # of the whole plan
COLOURS = {(1,): "#8db8e8", (2,): "#f2a96b", (1, 2): "#74c69a", (): "#f4f4f4"}  # by the sequences of a page


def moving() -> Plan:
    """The plan that the README shows."""
    return parse_spec("mesh:grid=3x3").plan(9)


def plans() -> dict[str, Plan]:
    """The plan that each image shows, by the name of its file."""
    return {
        f"{file_name(spec, ranks, backward)}.png": parse_spec(spec).plan(ranks, backward=backward)
        for spec, ranks in IMAGES
        for backward in (False, True)
    }


def draw_moving(plan: Plan, path: Path) -> None:
    """The plan as it runs, in a picture that moves: what has not begun is left out."""
    shown = picture(plan)
    ends = sorted({bar.start for bar in shown.bars} | {bar.end for bar in shown.bars})
    frames = []
    for end in ends[1:]:
        figure = figure_of(replace(shown, bars=tuple(bar for bar in shown.bars if bar.start < end)))
        figure.set_dpi(80)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        frames.append(Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB"))
    first, *others = frames
    durations = [MILLISECONDS] * len(others) + [LAST]
    first.save(
        path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True, comment=shown.digest
    )


def cache() -> list[list[tuple[tuple[int, ...], list[int]]]]:
    """Two sequences on four ranks: for each rank and page the sequences that use it, and the places of its rows."""
    tables = PageTables(4, 5, 4)
    first = tables.open()
    tables.add({first: 26})
    for _ in range(6):
        tables.add({first: 1})
    second, _ = tables.fork(first, 20)
    tables.add({second: 13})
    return [[_page(tables, rank, page) for page in range(5)] for rank in range(4)]


def _page(tables: PageTables, rank: int, page: int) -> tuple[tuple[int, ...], list[int]]:
    rows = {
        s: [at for slot, at in zip(tables.slots(s, rank), tables.positions(s, rank), strict=True) if slot // 4 == page]
        for s in (1, 2)
    }
    return tuple(s for s, places in rows.items() if places), [int(x) for x in max(rows.values(), key=len)]


def draw_cache(path: Path) -> None:
    """Each rank's pages side by side; a row is a box with its place in the sequence."""
    figure = Figure(figsize=(9, 3.2))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.07, 0.04, 0.91, 0.84))
    for rank, pages in enumerate(cache()):
        axes.text(-0.4, -rank, f"rank {rank}", ha="right", va="center")
        for page, (users, places) in enumerate(pages):
            for row in range(4):
                left = page * 4.6 + row
                used = row < len(places)
                colour = COLOURS[users if used else ()]
                axes.add_patch(Rectangle((left, -rank - 0.35), 1, 0.7, facecolor=colour, edgecolor="white"))
                if used:
                    axes.text(left + 0.5, -rank, str(places[row]), ha="center", va="center", fontsize=9)
            axes.add_patch(Rectangle((page * 4.6, -rank - 0.35), 4, 0.7, fill=False, edgecolor="#41506b"))
    names = {(1,): "the first sequence", (2,): "its fork", (1, 2): "both: a shared page", (): "free"}
    for i, (users, name) in enumerate(names.items()):
        axes.add_patch(Rectangle((i * 5.6, 0.62), 0.6, 0.3, facecolor=COLOURS[users], edgecolor="#41506b"))
        axes.text(i * 5.6 + 0.8, 0.77, name, va="center", fontsize=9)
    axes.set(xlim=(-0.3, 22.6), ylim=(-3.5, 1.05))
    axes.axis("off")
    figure.savefig(path, dpi=120, metadata={"Description": str(cache())})


def main() -> None:
    for name, plan in plans().items():
        draw(plan, FOLDER / name)
        print(f"wrote {FOLDER / name}")
    draw_cache(FOLDER / CACHE)
    print(f"wrote {FOLDER / CACHE}")
    draw_moving(moving(), FOLDER / MOVING)
    print(f"wrote {FOLDER / MOVING}")
    for path in FOLDER.iterdir():
        if path.name not in (*plans(), CACHE, MOVING):
            path.unlink()
            print(f"removed {path}")


if __name__ == "__main__":
    main()
