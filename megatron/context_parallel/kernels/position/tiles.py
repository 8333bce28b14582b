"""Tile sizes of the position kernel by GPU architecture, kernel and head_dim; none of them spills registers."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """Query rows and key rows of a tile, and the warps and pipeline stages that work on it."""

    rows: int
    keys: int
    warps: int
    stages: int


FLOAT32 = Tiles(32, 32, 4, 1)  # float32 on every GPU, and everything on the CPU interpreter

TILES_OF_FEW_ROWS = {  # by head_dim, on every architecture
    64: Tiles(32, 128, 4, 3),
    80: Tiles(32, 64, 4, 3),
    96: Tiles(32, 64, 4, 3),
    128: Tiles(32, 64, 4, 3),
    192: Tiles(32, 32, 4, 3),
    256: Tiles(32, 32, 4, 3),
}

# "dqkv" computes all three gradients with 5 products per tile. It exists only where its tiles fit in registers;
# smaller tiles would be slower than "dq" and "dkv", which together compute 7 products.
# "capped ..." is for scores with a softcap. They need more registers, and the other tiles would spill.
TILES: dict[int, dict[str, dict[int, Tiles]]] = {
    80: {
        "forward": {
            64: Tiles(128, 128, 8, 3),
            80: Tiles(128, 128, 8, 2),
            96: Tiles(128, 128, 8, 2),
            128: Tiles(128, 64, 8, 3),
            192: Tiles(128, 32, 8, 2),
            256: Tiles(64, 64, 8, 2),
        },
        "few rows": TILES_OF_FEW_ROWS,
        "dq": {
            64: Tiles(128, 64, 8, 3),
            80: Tiles(128, 64, 8, 3),
            96: Tiles(128, 64, 8, 3),
            128: Tiles(128, 64, 8, 3),
            192: Tiles(64, 16, 8, 2),
            256: Tiles(64, 32, 8, 2),
        },
        "dkv": {
            64: Tiles(32, 128, 8, 3),
            80: Tiles(32, 128, 8, 1),
            96: Tiles(16, 128, 8, 2),
            128: Tiles(32, 64, 8, 2),
            192: Tiles(32, 32, 8, 2),
            256: Tiles(32, 32, 8, 2),
        },
        "capped dkv": {
            64: Tiles(16, 128, 8, 3),
            80: Tiles(16, 128, 8, 1),
            96: Tiles(16, 128, 8, 2),
            128: Tiles(16, 64, 8, 2),
            192: Tiles(16, 32, 8, 2),
            256: Tiles(16, 32, 8, 2),
        },
        "dqkv": {
            64: Tiles(32, 64, 8, 3),
        },
    },
    90: {
        "forward": {
            64: Tiles(128, 128, 8, 3),
            80: Tiles(128, 128, 8, 2),
            96: Tiles(128, 128, 8, 2),
            128: Tiles(128, 128, 8, 2),
            192: Tiles(128, 64, 8, 2),
            256: Tiles(128, 64, 8, 2),
        },
        "few rows": TILES_OF_FEW_ROWS,
        "dq": {
            64: Tiles(128, 64, 8, 3),
            80: Tiles(128, 64, 8, 3),
            96: Tiles(128, 64, 8, 3),
            128: Tiles(128, 64, 8, 3),
            192: Tiles(128, 32, 8, 2),
            256: Tiles(128, 32, 8, 2),
        },
        "dkv": {
            64: Tiles(64, 128, 8, 3),
            80: Tiles(64, 128, 8, 2),
            96: Tiles(64, 128, 8, 2),
            128: Tiles(64, 128, 8, 2),
            192: Tiles(32, 64, 8, 2),
            256: Tiles(32, 32, 8, 2),
        },
        "capped dkv": {
            64: Tiles(32, 128, 8, 3),
            80: Tiles(32, 128, 8, 2),
            96: Tiles(32, 128, 8, 2),
            128: Tiles(32, 128, 8, 2),
            192: Tiles(16, 64, 8, 2),
            256: Tiles(16, 32, 8, 2),
        },
        "dqkv": {
            64: Tiles(64, 128, 8, 3),
            80: Tiles(64, 128, 8, 2),
        },
    },
    100: {
        "forward": {
            64: Tiles(128, 128, 8, 3),
            80: Tiles(128, 128, 8, 2),
            96: Tiles(128, 128, 8, 2),
            128: Tiles(128, 64, 8, 3),
            192: Tiles(128, 64, 8, 2),
            256: Tiles(128, 32, 8, 2),
        },
        "few rows": TILES_OF_FEW_ROWS,
        "dq": {
            64: Tiles(128, 64, 4, 3),
            80: Tiles(128, 64, 8, 3),
            96: Tiles(128, 64, 8, 2),
            128: Tiles(128, 64, 8, 3),
            192: Tiles(128, 64, 8, 1),
            256: Tiles(64, 32, 8, 2),
        },
        "dkv": {
            64: Tiles(64, 128, 8, 3),
            80: Tiles(32, 128, 8, 2),
            96: Tiles(64, 128, 8, 3),
            128: Tiles(64, 128, 8, 2),
            192: Tiles(32, 64, 8, 2),
            256: Tiles(32, 64, 8, 2),
        },
        "capped forward": {
            96: Tiles(128, 64, 8, 2),
        },
        "capped dkv": {
            64: Tiles(32, 128, 8, 3),
            80: Tiles(16, 128, 8, 2),
            96: Tiles(32, 64, 4, 2),
            128: Tiles(32, 128, 8, 2),
            192: Tiles(16, 64, 8, 2),
            256: Tiles(16, 64, 8, 2),
        },
        "dqkv": {
            64: Tiles(64, 128, 8, 3),
            80: Tiles(64, 128, 8, 2),
            96: Tiles(64, 128, 8, 2),
        },
    },
}
