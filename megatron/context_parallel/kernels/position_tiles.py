"""Tile sizes of the position kernel for each GPU architecture, kernel and head_dim: none spills registers."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """Query rows and key rows of a tile, and the warps and pipeline stages that work on it."""

    rows: int
    keys: int
    warps: int
    stages: int


FLOAT32 = Tiles(32, 32, 4, 1)  # also what the CPU interpreter runs

TILES: dict[int, dict[str, dict[int, Tiles]]] = {}
