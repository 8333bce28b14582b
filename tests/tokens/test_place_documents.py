"""Placements of documents: equal rows, equal work, few cuts; refusals."""

import numpy as np
import pytest
import torch

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.tokens.chunk_loads import ChunkLoads, chunk_loads
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.place_documents import Costs, place
from megatron.context_parallel.tokens.placement import Placement

FREE = Costs(1.0)  # keys arrive at once


def packed(lengths: list[int], tokens: int) -> Documents:
    return Documents.packed(torch.tensor([0, *lengths]).cumsum(0), tokens)


def slices(placement: Placement) -> list[list[tuple[int, int]]]:
    return [[(start, start + rows) for start, _, rows in of_chunk.tolist()] for of_chunk in placement.of_chunks]


def loads_of(documents: Documents, placement: Placement, causal=True, window=(-1, -1)) -> ChunkLoads:
    return chunk_loads(Mask(causal, window, documents.end_to_end()), placement)


def drawn(median: float, sigma: float, ranks: int, seed: int) -> Documents:
    """Log-normal documents that fill 16,384 tokens on each rank."""
    tokens = ranks * 16384
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, tokens // 100).astype(int).clip(1)
    ends = lengths.cumsum()
    return packed([*np.diff(np.append(ends[ends < tokens], tokens), prepend=0).tolist()], tokens)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_one_document_is_laid_out_as_a_zigzag(n):
    placement = place(packed([n * 16], n * 16), n, FREE)
    zigzag = Chunks.of("zigzag", n, n * 16)
    for chunk in range(n):
        assert placement.positions(chunk).tolist() == zigzag.positions(chunk).tolist()


def test_documents_of_one_length_stay_whole():
    documents = packed([8] * 8, 64)
    assert not loads_of(documents, place(documents, 4, FREE)).rows.any()


def test_a_long_document_brings_the_work_and_short_ones_the_rows():
    # 32 tokens are 528 pairs, 16 documents of 2 are 48: each rank gets half of the pairs and half of the rows.
    documents = packed([32, *[2] * 16], 64)
    placement = place(documents, 2, FREE)
    assert slices(placement) == [[(0, 8), (24, 48)], [(8, 24), (48, 64)]]
    loads = loads_of(documents, placement)
    assert loads.pairs.tolist() == [288, 288]
    assert loads.rows.tolist() == [[0, 16], [8, 0]]


def test_padding_fills_ranks():
    documents = packed([8, 8], 64)
    placement = place(documents, 4, FREE)
    loads = loads_of(documents, placement)
    assert loads.pairs.tolist() == [18, 18, 18, 18]
    assert placement.rows == (16, 16, 16, 16)


def test_samples_lie_end_to_end():
    ids = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]])
    assert slices(place(Documents(ids), 2, FREE)) == [[(0, 8)], [(8, 16)]]


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize(("median", "sigma", "received"), [(1100, 1.5, 0.35), (8000, 1.4, 0.7)])
def test_drawn_documents(median, sigma, received, ranks):
    for seed in range(3):
        documents = drawn(median, sigma, ranks, seed)
        placement = place(documents, ranks, FREE)
        loads = loads_of(documents, placement)
        assert loads.pairs.max() <= 1.02 * loads.pairs.mean()  # no placement has less than the mean
        assert loads.rows.sum(1).max() <= received * placement.length
        again = place(documents, ranks, FREE)
        assert again.digest() == placement.digest()


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_small_batches_are_balanced(ranks):
    tokens = 256 * ranks
    for seed in range(10):
        draw = np.random.default_rng([ranks, seed])
        cuts = np.sort(draw.choice(np.arange(1, tokens), draw.integers(1, 40), replace=False))
        documents = packed([*np.diff([0, *cuts]).tolist()], tokens)  # what is after the last cut is padding
        loads = loads_of(documents, place(documents, ranks, FREE))
        assert loads.pairs.max() <= 1.05 * loads.pairs.mean()


def test_cut_documents_go_on_on_the_next_rank():
    documents = drawn(1100, 1.5, 32, 0)
    loads = loads_of(documents, place(documents, 32, FREE))
    # A rank sees 2.9 others. It would be 6 if cut documents waited for any rank, 4 if the longest were not cut first.
    assert (loads.rows > 0).sum() <= 3.5 * 32


@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (512, 0)), (False, (300, 300))])
def test_other_masks_are_balanced(causal, window):
    documents = drawn(1100, 1.5, 8, 0)
    placement = place(documents, 8, FREE, causal, [window])
    loads = loads_of(documents, placement, causal, window)
    assert loads.pairs.max() <= 1.03 * loads.pairs.mean()


def test_layers_with_other_windows_are_balanced_together():
    """Three layers with a short window and one without: each rank has equal work over all of them."""
    documents, window, full = drawn(8000, 1.4, 8, 0), (1024, 0), (-1, -1)
    placement = place(documents, 8, FREE, windows=[window, window, window, full])
    of_window, of_full = (loads_of(documents, placement, window=given).pairs for given in (window, full))
    together = 3 * of_window + of_full
    assert together.max() <= 1.01 * together.mean()
    of_first = place(documents, 8, FREE, windows=[window])  # what the first layer alone would get
    work = 3 * loads_of(documents, of_first, window=window).pairs + loads_of(documents, of_first).pairs
    assert work.max() > 1.5 * work.mean()
    assert of_first.digest() == place(documents, 8, FREE, windows=[window, window]).digest()


def test_with_a_short_window_ranks_have_consecutive_slices():
    documents = packed([4096], 4096)
    placement = place(documents, 4, FREE, windows=[(64, 0)])
    assert slices(placement) == [[(0, 1024)], [(1024, 2048)], [(2048, 3072)], [(3072, 4096)]]
    assert loads_of(documents, placement, window=(64, 0)).rows.sum(1).tolist() == [0, 64, 64, 64]


def test_slow_links_save_cuts():
    # Equal work needs a part of the document of 110 on the other rank; with slow links it stays whole.
    documents = packed([110, 90], 256)
    cut = place(documents, 2, FREE)
    whole = place(documents, 2, Costs(1.0, 1000.0, 1000.0))
    assert loads_of(documents, cut).rows.any()
    assert not loads_of(documents, whole).rows.any()


def test_seconds_of_ranks():
    loads = ChunkLoads(np.array([10, 100, 10]), np.array([[0, 1, 2], [0, 0, 3], [0, 0, 0]]))
    costs = Costs(0.5, row_inside=2.0, row_between=10.0, ranks_per_node=2)
    assert costs.of_links(loads).tolist() == [2 + 20, 2 + 30, 20 + 30]  # keys in, and gradients back
    assert costs.seconds(loads).tolist() == [22, 50, 50]


@pytest.mark.parametrize(
    ("n", "told"),
    [
        (5, "placement of 64 tokens over 5 ranks: equally many on each; give 4 ranks"),
        (0, "placement of 64 tokens over 0 ranks: equally many on each; give 1 ranks"),
    ],
)
def test_ranks_that_do_not_divide_the_tokens(n, told):
    with pytest.raises(UsageError, match=f"^{told}$"):
        place(packed([64], 64), n, FREE)
