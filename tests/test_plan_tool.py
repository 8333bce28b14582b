"""tools/plan.py and the drawings."""

import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.plan.draw import draw

TOOL = Path(__file__).parents[1] / "tools" / "plan.py"


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(TOOL), *argv], capture_output=True, text=True, env={"COLUMNS": "200", "PYTHONPATH": "."}
    )


def test_table_and_drawings(tmp_path):
    done = run("ring", "allgather", "--ranks", "4", "--layout", "contiguous", "--draw", str(tmp_path / "p.png"))
    assert done.returncode == 0, done.stderr
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert ["ring", "contiguous", "forward", "-", "6", "6 KV", "4", "37.50%", "8"] in cells
    assert ["allgather", "contiguous", "backward", "-", "12", "6 DKV + 6 KV", "3", "37.50%", "21"] in cells
    pictures = sorted(p.name for p in tmp_path.iterdir())
    passes = ("backward", "forward")
    assert pictures == [f"p-{name}-{way}.png" for name in ("allgather", "ring") for way in passes]


def test_bytes_of_a_sequence():
    flags = ["--num-attention-heads", "8", "--num-query-groups", "2", "--kv-channels", "64", "--seq-length", "4096"]
    done = run("ring:head_parallel_size=2", "mesh:head_parallel_size=2,grid=1x2", "--ranks", "4", *flags)
    assert done.returncode == 0, done.stderr
    sizes = [line.split("│")[4].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    unit = 1024 * 8 * 64 * 2 / 2**20  # a chunk of queries in 16 bits, MiB
    swaps = (2 + 2 / 4) / 2  # Q, KV and O, or their gradients, half of each
    forward, backward = swaps + 2 / 4, swaps + 2 / 4 + 2 * 2 / 4
    statistic = 1024 * 8 * 4 / 2**20  # log-sum-exp or delta of a chunk in float32, MiB
    expected = [forward * unit + statistic / 2, backward * unit + statistic / 2]  # half of either is swapped
    assert sizes == [f"{size:.4g} MiB" for size in expected * 2]


def test_drawing_shows_who_computes_what(tmp_path):
    """The cell of a pair has its rank's colour: in a ring, rows of one colour; nothing above the diagonal."""
    path = tmp_path / "ring.png"
    draw(STRATEGIES["ring"].plan(20, layout="contiguous"), path)
    image = matplotlib.image.imread(path)[:, :, :3]
    colours = {tuple(c) for c in (matplotlib.colormaps["tab20"](range(20))[:, :3] * 255).round().astype(int)}
    seen = {tuple(c) for c in (image.reshape(-1, 3) * 255).round().astype(int)}
    assert colours <= seen
    svg = tmp_path / "ring.svg"
    draw(STRATEGIES["ring"].plan(4), svg)
    assert "ring, 4 ranks, zigzag layout, forward" in svg.read_text().replace("<!-- ", "")


@pytest.mark.parametrize(
    "argv,words",
    [
        (["spiral", "--ranks", "4"], ["--cp-strategy spiral", "ring"]),
        (["ring", "--ranks", "0"], ["--ranks 0", "at least 1"]),
        (["ring", "--ranks", "4", "--seq-length", "6"], ["--seq-length 6", "--ranks 4"]),
        (["ulysses", "--ranks", "4", "--num-attention-heads", "6"], ["--cp-head-parallel-size 4", "1, 2, 3, 6"]),
        (["ring", "--ranks", "4", "--draw", "p.gif"], ["--draw p.gif", ".png or .svg"]),
        (["ring", "--ranks", "4", "--draw", "no/where.png"], ["--draw no/where.png", "make it first"]),
        (
            ["ring", "--ranks", "4", "--num-attention-heads", "8", "--num-query-groups", "3"],
            ["--num-query-groups 3", "divide", "8"],
        ),
    ],
)
def test_mistakes(argv, words):
    done = run(*argv)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr
