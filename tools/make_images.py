"""Draws what the documentation shows into docs/images. Run `python -m tools.make_images` after a change of it."""

from pathlib import Path

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from megatron.context_parallel.inference.pages import PageTables
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.pictures.draw import draw, figure_of, file_name
from megatron.context_parallel.plan.pictures.lanes import picture
from megatron.context_parallel.strategies import parse_spec

from . import draw_causal, draw_comparison, draw_documents, draw_handoff, draw_inference, draw_layers
from .compare_strategies import FILE as COMPARISON

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
CAUSAL = "causal-ring-8-ranks.png"
DOCUMENTS = "documents-32-ranks.png"
HANDOFF = "handoff.png"
LAYERS = "layers.png"
LOGO = "logo.svg"
MOVING = "mesh-grid-3x3-9-ranks.gif"
MILLISECONDS = 500  # of a frame, in which a message travels
LAST = 3000  # of the whole plan
COLOURS_OF_A_FILE = 127
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
        figure = figure_of(shown, until=end)
        figure.set_dpi(80)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        frames.append(Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB"))
    first, *others = [in_colours_of(frames[-1], frame) for frame in frames]
    durations = [MILLISECONDS] * len(others) + [LAST]
    how = {"save_all": True, "append_images": others, "duration": durations, "loop": 0, "optimize": True}
    first.save(path, comment=shown.digest, **how)


def cache() -> list[list[tuple[tuple[int, ...], list[int]]]]:
    """Two sequences on four ranks: for each rank and page the sequences that use it, and the places of its rows."""
    tables = PageTables(4, 5, 4)
    first = tables.open()
    tables.add({first: 26})
    for _ in range(6):
        tables.add({first: 1})
    second, _ = tables.fork(first, 20)
    tables.add({second: 13})
    pages = []
    for rank in range(4):
        pages.append([_page(tables, rank, page) for page in range(5)])
    return pages


def _page(tables: PageTables, rank: int, page: int) -> tuple[tuple[int, ...], list[int]]:
    rows = {}
    for s in (1, 2):
        places = zip(tables.slots(s, rank), tables.positions(s, rank), strict=True)
        rows[s] = [at for slot, at in places if slot // 4 == page]
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


def logo() -> str:
    """A causal attention of four chunks in SVG: a row for each chunk of queries, a colour for each step of a ring."""
    steps = ("#0072b2", "#e69f00", "#009e73", "#56b4e9")
    cells = []
    for query in range(4):
        for key in range(query + 1):
            at = f'x="{key * 16 + 1}" y="{query * 16 + 1}"'
            cells.append(f'<rect {at} width="14" height="14" rx="3" fill="{steps[query - key]}"/>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">{"".join(cells)}</svg>\n'


def in_colours_of(palette: Image.Image, image: Image.Image) -> Image.Image:
    """An RGB image with the most frequent colours of another, which makes its file a third as long."""
    common = sorted(palette.getcolors(palette.width * palette.height), reverse=True)[:COLOURS_OF_A_FILE]
    known = numpy.array([colour for _, colour in common])
    packed, which = numpy.unique(numpy.asarray(image) @ numpy.array([1 << 16, 1 << 8, 1]), return_inverse=True)
    colours = numpy.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)
    nearest = ((colours[:, None] - known) ** 2).sum(2).argmin(1)  # Pillow's own is off by a few shades
    few = Image.fromarray(nearest[which].reshape(image.height, image.width).astype(numpy.uint8), "P")
    few.putpalette(known.astype(numpy.uint8).tobytes())
    return few


def shrink(path: Path) -> None:
    """Gives a PNG few colours, and keeps its text."""
    with Image.open(path) as image:
        kept = PngInfo()
        for name, text in image.text.items():
            kept.add_text(name, text)
        whole = image.convert("RGB")
    in_colours_of(whole, whole).save(path, optimize=True, pnginfo=kept)


def digests() -> dict[str, str]:
    """What each PNG has as its `Description` if it shows what there is today."""
    shown = {name: picture(plan).digest for name, plan in plans().items()}
    shown |= {CACHE: str(cache()), CAUSAL: draw_causal.digest(), LAYERS: draw_layers.digest()}
    shown[DOCUMENTS] = draw_documents.digest()
    shown[HANDOFF] = draw_handoff.digest()
    shown |= dict.fromkeys((draw_inference.STEP, draw_inference.ENGINE), draw_inference.digest())
    return shown | dict.fromkeys(draw_comparison.PICTURES, draw_comparison.digest())


def main() -> None:
    for name, plan in plans().items():
        draw(plan, FOLDER / name)
    draw_cache(FOLDER / CACHE)
    draw_causal.draw_causal(FOLDER / CAUSAL)
    draw_handoff.draw_handoff(FOLDER / HANDOFF)
    draw_layers.draw_layers(FOLDER / LAYERS)
    draw_documents.draw_documents(FOLDER / DOCUMENTS)
    draw_inference.draw_inference(FOLDER)
    draw_comparison.draw_comparison(FOLDER)
    for path in FOLDER.glob("*.png"):
        shrink(path)
    draw_moving(moving(), FOLDER / MOVING)
    (FOLDER / LOGO).write_text(logo())
    known = {*digests(), MOVING, LOGO, COMPARISON.name}
    for path in FOLDER.iterdir():
        if path.name in known:
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
        else:
            path.unlink()
            print(f"removed {path}")


if __name__ == "__main__":
    main()
