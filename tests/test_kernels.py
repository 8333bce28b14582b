"""Blocks: how masks are cut, what kernels return, and how partial outputs merge."""

import random

import pytest
import torch

from megatron.context_parallel import LAYOUTS
from megatron.context_parallel.blocks import Blocks
from megatron.context_parallel.kernels import BlockGrad, Scores
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, Runs, cut
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.layout import Chunks
from megatron.context_parallel.mask import Documents, Mask


def covered(cut, q_rows: int, kv_rows: int) -> torch.Tensor:
    """How often each (query, key) is computed."""
    count = torch.zeros(q_rows, kv_rows, dtype=torch.int)
    for piece in cut:
        block = count[piece.q, piece.kv]
        assert block.numel()
        if isinstance(piece.mask, Runs):
            keys = torch.arange(block.shape[1])
            block += ((keys >= piece.mask.first.T) & (keys < piece.mask.end.T)).int()
        elif piece.mask == CAUSAL:
            assert block.shape[0] == block.shape[1]
            block += torch.ones_like(block).tril()
        else:
            block += 1
    return count


def seen(block: Runs, kv_rows: int) -> torch.Tensor:
    keys = torch.arange(kv_rows)
    return ((keys >= block.first.T) & (keys < block.end.T)).int()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_pieces_of_causal_chunks_need_no_runs(layout, n):
    kernel = AtenFlash()
    blocks = Blocks(Mask(), *Chunks.pair(layout, n, 72 * n), kernel)
    for q in range(n):
        for chunks in [(kv,) for kv in range(n)] + [tuple(range(n)), tuple(c for c in range(n) if c != q) or (q,)]:
            block, keys = blocks.runs(q, chunks), 72 * len(chunks)
            assert torch.equal(covered(blocks.pieces(q, chunks), 72, keys), seen(block, keys))
            assert all(piece.mask in (FULL, CAUSAL) for piece in blocks.pieces(q, chunks))


def test_how_many_pieces():
    def pieces(mask: Mask, layout: str, q: int, *chunks: int) -> list[str]:
        cut = Blocks(mask, *Chunks.pair(layout, 4, 256), Reference()).pieces(q, chunks)
        return ["runs" if isinstance(piece.mask, Runs) else piece.mask for piece in cut]

    for layout in LAYOUTS:  # a chunk against itself is one causal square in every layout
        assert pieces(Mask(), layout, 1, 1) == [CAUSAL]
    assert pieces(Mask(), "zigzag", 2, 0) == pieces(Mask(), "zigzag", 0, 2) == [FULL]
    assert pieces(Mask(), "contiguous", 3, 0, 1, 2) == [FULL]
    assert pieces(Mask(), "contiguous", 0, 1, 2) == []
    assert pieces(Mask(), "cyclic", 1, 0, 1, 2, 3) == [CAUSAL] * 4  # a staircase of four diagonals
    assert pieces(Mask(True, (40, 0)), "contiguous", 2, 2) == [CAUSAL, "runs"]  # until the window is full
    one_each = Documents(torch.arange(256))
    assert pieces(Mask(documents=one_each), "contiguous", 2, 2) == ["runs"]
    halves = Documents(torch.arange(256) // 32)
    assert pieces(Mask(documents=halves), "contiguous", 2, 2) == [CAUSAL, CAUSAL]


def test_cut_covers_any_runs_once():
    draw = random.Random(0)
    for _ in range(300):
        rows, keys = draw.choice([1, 2, 7, 40, 90]), draw.choice([1, 5, 50, 120])
        steps = [draw.choice([(0, 0), (0, 1), (1, 1), (0, 3), (2, 0), (7, 9), (0, 0), (0, 1)]) for _ in range(rows)]
        lasting = [steps[i // 20] for i in range(rows)] if draw.random() < 0.5 else steps
        first = torch.tensor([a for a, _ in lasting]).cumsum(0).sub(draw.choice([0, 5])).clamp(0, keys)
        end = torch.tensor([b for _, b in lasting]).cumsum(0).clamp(0, keys)
        block = Runs(first[None].int(), torch.maximum(first, end)[None].int())
        for short in (0, 8, 32):
            cut_up = cut(block, short)
            assert torch.equal(covered(cut_up, rows, keys), seen(block, keys))


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows,keys,heads,group,dim", [(33, 33, 3, 2, 16), (1, 1, 2, 1, 64), (130, 130, 1, 4, 96)])
def test_aten_equals_reference(dtype, bound, causal, rows, keys, heads, group, dim):
    torch.manual_seed(rows)
    q, dout = (torch.randn(rows, heads, group, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(keys, heads, dim).to(dtype) for _ in range(2))
    mask, scores = CAUSAL if causal else FULL, Scores(0.2)
    aten, reference = AtenFlash(), Reference()
    out, lse = reference.forward(q, k, v, mask, scores)
    got_out, got_lse = aten.forward(q, k, v, mask, scores)
    # Statistics of a longer sequence, as in a plan: the log-sum-exp is above that of this block alone.
    lse_all, delta = lse + 0.7, (dout.double() * out).sum(-1) * 0.5
    wide = torch.promote_types(dtype, torch.float32)
    expected = reference.backward(BlockGrad(dout, q, k, v, lse_all, delta, mask), scores)
    got = aten.backward(BlockGrad(dout, q, k, v, lse_all.to(wide), delta.to(wide), mask), scores)
    for a, b in zip((got_out, got_lse, *got), (out, lse, *expected), strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= bound * b.norm() + 1e-12


def test_backward_takes_delta_where_the_output_gradient_is_zero():
    q, k, v = (torch.randn(4, 1, 1, 8), torch.randn(4, 1, 8), torch.randn(4, 1, 8))
    aten = AtenFlash()
    _, lse = aten.forward(q, k, v, CAUSAL, Scores(1.0))
    grads = aten.backward(BlockGrad(torch.zeros_like(q), q, k, v, lse, torch.zeros(4, 1, 1), CAUSAL), Scores(1.0))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_merge_is_attention_over_both_sets_of_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 1, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    reference, how = Reference(), {"mask": FULL, "scores": Scores(1.0)}
    whole = reference.forward(q, k, v, **how)
    out, lse = reference.forward(q, k[:4], v[:4], **how)
    merge(out, lse, *reference.forward(q, k[4:], v[4:], **how))
    assert torch.allclose(out, whole[0], atol=1e-14) and torch.allclose(lse, whole[1], atol=1e-14)


def test_merge_with_rows_that_saw_nothing():
    out, lse = torch.zeros(3, 2), torch.tensor([-torch.inf, 1.0, -torch.inf])
    out[1] = 5
    merge(out, lse, torch.full((3, 2), 7.0), torch.tensor([2.0, -torch.inf, -torch.inf]))
    assert out.tolist() == [[7, 7], [5, 5], [0, 0]]
    assert lse.tolist() == [2.0, 1.0, -torch.inf]


def test_merge_of_scores_far_apart():
    out, lse = torch.full((2, 1), 1.0), torch.tensor([1e4, -1e4])
    merge(out, lse, torch.full((2, 1), 2.0), torch.tensor([-1e4, 1e4]))
    assert out.flatten().tolist() == [1.0, 2.0] and lse.tolist() == [1e4, 1e4]
