"""Shared cos and sin: results and gradients are megatron-core's to the bit, and autograd keeps one copy."""

from functools import cache

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron.context_parallel.patches import megatron_rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_are_those_of_megatron_core(dtype, interleaved):
    megatron_rope.share_cos_and_sin()
    angles = torch.randn(6, 1, 1, 8)
    results = []
    for rotate in (megatron_rope._rotate, rope_utils._apply_rotary_pos_emb_bshd):
        torch.manual_seed(1)
        t = torch.randn(6, 2, 3, 12, dtype=dtype, requires_grad=True)
        out = rotate(t, angles, rotary_interleaved=interleaved, mscale=1.0)
        out.backward(torch.randn_like(out))
        results.append((out, t.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_on_a_gpu_a_rotation_is_one_graph_with_and_without_gradients(monkeypatch):
    compiled, compile_as_given = [], torch.compile

    def compile_without_inductor(function):
        compiled.append(function)
        return compile_as_given(function, backend="aot_eager", fullgraph=True)

    megatron_rope.share_cos_and_sin()
    t, angles = torch.randn(6, 2, 3, 12, requires_grad=True), torch.randn(6, 1, 1, 4).repeat(1, 1, 1, 2)
    expected = rope_utils._apply_rotary_pos_emb_bshd(t, angles)
    gradient = torch.randn_like(t)
    (wanted,) = torch.autograd.grad(expected, t, gradient)
    with monkeypatch.context() as patch:
        patch.setattr(megatron_rope, "_compiled", cache(megatron_rope._compiled.__wrapped__))
        patch.setattr(torch, "compile", compile_without_inductor)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
        with torch.no_grad():
            first = rope_utils._apply_rotary_pos_emb_bshd(t, angles)
        again = rope_utils._apply_rotary_pos_emb_bshd(t, angles)
        (found,) = torch.autograd.grad(again, t, gradient)
    assert compiled == [megatron_rope.rotation, megatron_rope.rotation_back]
    assert torch.equal(first, expected) and torch.equal(again, expected)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_other_rotations_are_left_to_megatron_core():
    megatron_rope.share_cos_and_sin()
    t, angles = torch.randn(6, 2, 3, 8), torch.randn(6, 1, 1, 8)
    for others in ((False, False, 0.5), (False, True, 1.0)):  # scaled; of latent attention
        rotated = rope_utils._apply_rotary_pos_emb_bshd(t, angles, *others)
        assert torch.equal(rotated, megatron_rope._rotate(t, angles, *others))


def test_angles_that_are_overwritten_are_read_again():
    megatron_rope.share_cos_and_sin()
    t, angles = torch.randn(6, 2, 3, 8, requires_grad=True), torch.randn(6, 1, 1, 8)
    rope_utils._apply_rotary_pos_emb_bshd(t, angles)
    angles.add_(1)
    assert torch.equal(rope_utils._apply_rotary_pos_emb_bshd(t, angles), megatron_rope._rotate(t, angles))


def test_one_copy_is_kept_as_long_as_the_angles():
    megatron_rope.share_cos_and_sin()
    angles = torch.randn(6, 1, 1, 8)
    kept = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    before = len(megatron_rope._tables)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rotate = rope_utils._apply_rotary_pos_emb_bshd
        outs = [rotate(torch.randn(6, 2, 3, 8, requires_grad=True), angles) for _ in range(4)]
    assert len(kept) == 2
    assert len(megatron_rope._tables) == before + 1
    del outs, angles
    assert len(megatron_rope._tables) == before
