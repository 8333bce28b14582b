"""Draws the plans that the documentation shows, into docs/images. Run it after a change of a strategy or of drawing."""

from pathlib import Path

from megatron.context_parallel.plan.draw import draw, file_name
from megatron.context_parallel.strategies import choose

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


def main() -> None:
    for spec, ranks in IMAGES:
        for backward in (False, True):
            path = FOLDER / f"{file_name(spec, ranks, backward)}.png"
            draw(choose(spec).plan(ranks, backward=backward), path)
            print(f"wrote {path}")
    drawn = {f"{file_name(spec, ranks, backward)}.png" for spec, ranks in IMAGES for backward in (False, True)}
    for path in FOLDER.iterdir():
        if path.name not in drawn:
            path.unlink()
            print(f"removed {path}")


if __name__ == "__main__":
    main()
