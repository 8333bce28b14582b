"""Draws the plans that the documentation shows, into docs/images. Run it after a change of a strategy or of drawing."""

from pathlib import Path

from megatron.context_parallel.plan.draw import draw, file_name
from megatron.context_parallel.plan.ir import Plan
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


def plans() -> dict[str, Plan]:
    """The plan that each image shows, by the name of its file."""
    return {
        f"{file_name(spec, ranks, backward)}.png": choose(spec).plan(ranks, backward=backward)
        for spec, ranks in IMAGES
        for backward in (False, True)
    }


def main() -> None:
    for name, plan in plans().items():
        draw(plan, FOLDER / name)
        print(f"wrote {FOLDER / name}")
    for path in FOLDER.iterdir():
        if path.name not in plans():
            path.unlink()
            print(f"removed {path}")


if __name__ == "__main__":
    main()
