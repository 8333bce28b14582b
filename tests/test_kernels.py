"""Blocks: how masks are cut, what kernels return, and how partial outputs merge."""

import pytest
import torch

from megatron.context_parallel import LAYOUTS, UsageError
from megatron.context_parallel.kernels import kernel_for
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.masks import pieces
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.layout import Progression, positions, progressions


def covered(cut, q_rows: int, kv_rows: int) -> torch.Tensor:
    """How often each (query, key) is computed."""
    count = torch.zeros(q_rows, kv_rows, dtype=torch.int)
    for piece in cut:
        block = count[piece.q, piece.kv]
        if piece.causal:
            assert block.shape[0] == block.shape[1]
            block += torch.ones_like(block).tril()
        else:
            block += 1
        assert block.numel()
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_pieces_cover_the_mask_once(layout, n):
    length = 8 * n
    for q in range(n):
        for kv in range(n):
            at = [positions(layout, c, n, length) for c in (q, kv)]
            cut = pieces(*(progressions(layout, c, n, length) for c in (q, kv)), causal=True)
            assert torch.equal(covered(cut, 8, 8), (at[0][:, None] >= at[1][None, :]).int())


def test_pieces_of_shifted_diagonals():
    for start in range(-6, 9):
        for q_length, kv_length in [(4, 4), (3, 6), (6, 2), (1, 1)]:
            q, kv = Progression(start, 2, q_length), Progression(0, 2, kv_length)
            mask = torch.tensor([[start + 2 * i >= 2 * j for j in range(kv_length)] for i in range(q_length)])
            assert torch.equal(covered(pieces([q], [kv], True), q_length, kv_length), mask.int())


def test_neighbouring_full_pieces_join():
    n, length = 4, 64  # zigzag: an off-diagonal pair of chunks is one kernel call
    for q, kv in [(2, 0), (0, 2)]:
        assert len(pieces(progressions("zigzag", q, n, length), progressions("zigzag", kv, n, length), True)) == 1
    gathered = [Progression(0, 1, 8), Progression(8, 1, 8), Progression(16, 1, 8)]
    assert len(pieces([Progression(24, 1, 8)], gathered, True)) == 1


def test_different_strides_are_refused():
    with pytest.raises(UsageError, match="strides differ"):
        pieces([Progression(0, 4, 8)], [Progression(0, 1, 32)], True)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows,keys,heads,group,dim", [(33, 33, 3, 2, 16), (1, 1, 2, 1, 64), (130, 130, 1, 4, 96)])
def test_aten_equals_reference(dtype, bound, causal, rows, keys, heads, group, dim):
    torch.manual_seed(rows)
    q, dout = (torch.randn(rows, heads, group, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(keys, heads, dim).to(dtype) for _ in range(2))
    how = {"causal": causal, "scale": 0.2}
    aten, reference = AtenFlash(torch.device("cpu"), dtype), Reference()
    out, lse = reference.forward(q, k, v, **how)
    got_out, got_lse = aten.forward(q, k, v, **how)
    # Statistics of a longer sequence, as in a plan: the log-sum-exp is above that of this block alone.
    lse_all, delta = lse + 0.7, (dout.double() * out).sum(-1) * 0.5
    wide = torch.promote_types(dtype, torch.float32)
    expected = reference.backward(dout, q, k, v, lse_all, delta, **how)
    got = aten.backward(dout, q, k, v, lse_all.to(wide), delta.to(wide), **how)
    for a, b in zip((got_out, got_lse, *got), (out, lse, *expected), strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= bound * b.norm() + 1e-12


def test_backward_takes_delta_where_the_output_gradient_is_zero():
    q, k, v = (torch.randn(4, 1, 1, 8), torch.randn(4, 1, 8), torch.randn(4, 1, 8))
    aten = AtenFlash(torch.device("cpu"), torch.float32)
    _, lse = aten.forward(q, k, v, causal=True, scale=1.0)
    grads = aten.backward(torch.zeros_like(q), q, k, v, lse, torch.zeros(4, 1, 1), causal=True, scale=1.0)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_merge_is_attention_over_both_sets_of_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 1, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    reference, how = Reference(), {"causal": False, "scale": 1.0}
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


def test_float32_on_a_gpu_is_refused():
    with pytest.raises(UsageError, match=r"torch.float32 on cuda: .* --bf16"):
        kernel_for(torch.device("cuda"), torch.float32)
