"""The pairs and the needed keys of each chunk, against a dense mask."""

import random

import numpy as np
import pytest
import torch

from megatron.context_parallel.tokens.chunk_loads import ChunkLoads, chunk_loads, pairs_between
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import LAYOUTS, Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.placement import Placement
from tests.support.dense import visible

from .test_placement import random_documents, random_placement


def counted(chunks: Chunks | Placement, seen: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """Pairs and rows, counted in bool [length, length]."""
    positions = [chunks.positions(chunk) for chunk in range(chunks.n)]
    pairs = [int(seen[queries].sum()) for queries in positions]
    rows = torch.tensor([[int(seen[queries].any(0)[keys].sum()) for keys in positions] for queries in positions])
    return pairs, rows.fill_diagonal_(0).tolist()


@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (0, 0), (5, 2), (-1, 3), (2, -1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [*LAYOUTS, "placement"])
def test_as_counted_in_a_dense_mask(kind, causal, window):
    draw = random.Random(f"{kind} {causal} {window}")
    for _ in range(5):
        n = draw.choice([1, 2, 3, 4])
        length = 2 * n * draw.randrange(2, 9)
        ids = random_documents(draw, length)
        chunks = random_placement(draw, n, length) if kind == "placement" else Chunks.of(kind, n, length)
        got = chunk_loads(Mask(causal, window, Documents(ids)), chunks)
        positions = torch.arange(length)
        (seen,) = visible(positions, positions, causal, window, ids)
        assert (got.pairs.tolist(), got.rows.tolist()) == counted(chunks, seen)
        at = [chunks.positions(chunk) for chunk in range(n)]
        between = [[int(seen[queries][:, keys].sum()) for keys in at] for queries in at]
        assert pairs_between(Mask(causal, window, Documents(ids)), chunks).tolist() == between


def test_samples_are_added_and_a_plain_mask_is_one_document():
    one = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    two = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    chunks = Chunks.of("contiguous", 2, 8)
    both = chunk_loads(Mask(documents=Documents(torch.stack((one, two)))), chunks)
    assert both.pairs.tolist() == [10 + 6, 10 + 18]
    assert both.rows.tolist() == [[0, 0], [2, 0]]
    assert pairs_between(Mask(documents=Documents(torch.stack((one, two)))), chunks).tolist() == [[16, 0], [8, 20]]
    assert chunk_loads(Mask(), chunks).pairs.tolist() == [10, 26]
    assert chunk_loads(Mask(causal=False), chunks).rows.tolist() == [[0, 4], [4, 0]]


def test_rows_inside_a_node():
    loads = ChunkLoads(np.zeros(4, np.int64), np.arange(16).reshape(4, 4))
    assert loads.inside(2).tolist() == [[0, 1, 0, 0], [4, 5, 0, 0], [0, 0, 10, 11], [0, 0, 14, 15]]
    assert loads.inside(None).tolist() == loads.rows.tolist()
