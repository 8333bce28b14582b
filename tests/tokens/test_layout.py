"""Layouts: which tokens a chunk holds, and that sharding and gathering lose nothing."""

import pytest
import torch

from megatron.context_parallel import LAYOUTS, UsageError
from megatron.context_parallel.tokens.layout import positions, shard, unshard
from megatron.context_parallel.tokens.rank_grid import RankGrid


@pytest.mark.parametrize(
    "layout,expected",
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ("zigzag", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ("cyclic", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
    ],
)
def test_positions(layout, expected):
    assert [positions(layout, i, 3, 12).tolist() for i in range(3)] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_unshard_undoes_shard(layout, n):
    x = torch.arange(2 * 6 * n * 3).view(2, 6 * n, 3)
    chunks = [shard(x, layout, i, n, dim=1) for i in range(n)]
    assert all(c.shape == (2, 6, 3) for c in chunks)
    assert torch.equal(unshard(chunks, layout, dim=1), x)


@pytest.mark.parametrize("layout,length,works", [("zigzag", 12, "8"), ("cyclic", 10, "8"), ("contiguous", 3, "4")])
def test_length_that_does_not_divide(layout, length, works):
    with pytest.raises(UsageError, match=rf"--seq-length {length}: .* such as {works}$"):
        positions(layout, 0, 4, length)


def test_unknown_layout():
    with pytest.raises(UsageError, match="--cp-layout spiral: unknown; choose one of contiguous, zigzag, cyclic"):
        positions("spiral", 0, 2, 8)


def test_process_mesh():
    mesh = RankGrid(("tp", "cp", "dp"), (2, 3, 2))
    assert mesh.size == 12
    assert mesh.coordinates(9) == {"tp": 1, "cp": 1, "dp": 1}
    assert mesh.rank(tp=1, cp=1, dp=1) == 9
    assert mesh.along(9, "cp") == (7, 9, 11)
    assert mesh.along(3, "tp", "dp") == (2, 3, 8, 9)
    assert [mesh.rank(**mesh.coordinates(r)) for r in range(12)] == list(range(12))
    with pytest.raises(UsageError, match="one positive size"):
        RankGrid(("tp",), (0,))
