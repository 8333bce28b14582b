"""Blocks: how masks are cut, what kernels return, and how partial outputs merge."""

import math
import random

import pytest
import torch

from megatron.context_parallel import LAYOUTS, AllRanks, UsageError, context_parallel_attention
from megatron.context_parallel.kernels import softcap as softcap_cpu
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.libraries import LIBRARIES
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, cut
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.kernels.reference import Reference, attention
from megatron.context_parallel.plan.ir import T
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.runtime.executor import Executor
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask


def covered(cut, q_rows: int, kv_rows: int) -> torch.Tensor:
    """How often each (query, key) is computed."""
    count = torch.zeros(q_rows, kv_rows, dtype=torch.int)
    for piece in cut:
        block = count[piece.q, piece.kv]
        assert block.numel()
        if isinstance(piece.mask, KeyRanges):
            keys = torch.arange(block.shape[1])
            block += ((keys >= piece.mask.first.T) & (keys < piece.mask.end.T)).int()
        elif piece.mask == CAUSAL:
            assert block.shape[0] == block.shape[1]
            block += torch.ones_like(block).tril()
        else:
            block += 1
    return count


def seen(block: KeyRanges, kv_rows: int) -> torch.Tensor:
    keys = torch.arange(kv_rows)
    return ((keys >= block.first.T) & (keys < block.end.T)).int()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_pieces_of_causal_chunks_need_no_runs(layout, n):
    kernel = AtenFlash()
    blocks = Blocks(Mask(), *Chunks.pair(layout, n, 72 * n), kernel)
    for q in range(n):
        for chunks in [(kv,) for kv in range(n)] + [tuple(range(n)), tuple(c for c in range(n) if c != q) or (q,)]:
            block, keys = blocks.key_ranges(q, chunks), 72 * len(chunks)
            assert torch.equal(covered(blocks.pieces(q, chunks), 72, keys), seen(block, keys))
            assert all(piece.mask in (FULL, CAUSAL) for piece in blocks.pieces(q, chunks))


def test_how_many_pieces():
    def pieces(mask: Mask, layout: str, q: int, *chunks: int) -> list[str]:
        cut = Blocks(mask, *Chunks.pair(layout, 4, 256), Reference()).pieces(q, chunks)
        return ["key_ranges" if isinstance(piece.mask, KeyRanges) else piece.mask for piece in cut]

    for layout in LAYOUTS:  # a chunk against itself is one causal square in every layout
        assert pieces(Mask(), layout, 1, 1) == [CAUSAL]
    assert pieces(Mask(), "zigzag", 2, 0) == pieces(Mask(), "zigzag", 0, 2) == [FULL]
    assert pieces(Mask(), "contiguous", 3, 0, 1, 2) == [FULL]
    assert pieces(Mask(), "contiguous", 0, 1, 2) == []
    assert pieces(Mask(), "cyclic", 1, 0, 1, 2, 3) == [CAUSAL] * 4  # a staircase of four diagonals
    assert pieces(Mask(True, (40, 0)), "contiguous", 2, 2) == [CAUSAL, "key_ranges"]  # until the window is full
    one_each = Documents(torch.arange(256))
    assert pieces(Mask(documents=one_each), "contiguous", 2, 2) == ["key_ranges"]
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
        block = KeyRanges(first[None].int(), torch.maximum(first, end)[None].int())
        for short in (0, 8, 32):
            cut_up = cut(block, short)
            assert torch.equal(covered(cut_up, rows, keys), seen(block, keys))


CPU = torch.device("cpu")
TWO_SAMPLES = KeyRanges(  # documents with rows that see nothing, and a window; 300 rows are two tiles
    *(torch.stack(x).int() for x in (
        (torch.arange(300) // 70 * 70, (torch.arange(300) - 40).clamp(0)),
        (torch.arange(1, 301).where(torch.arange(300) % 70 < 50, torch.arange(300) // 70 * 70), torch.arange(1, 301)),
    ))
)  # fmt: skip
MASKS = {"full": (FULL, 33, 50), "causal": (CAUSAL, 130, 130), "key_ranges": (TWO_SAMPLES, 300, 300)}


def block(rows, keys, heads, group, dim, value_dim, dtype=torch.float32, size=1.0) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout, with scores of a deviation of `size` for the scale dim ** -0.5."""
    torch.manual_seed(rows)
    q, dout = (torch.randn(rows, heads, group, d).to(dtype) for d in (dim, value_dim))
    k, v = (torch.randn(keys, heads, d).to(dtype) for d in (dim, value_dim))
    return q * size, k, v, dout


def largest_error(kernel, q, k, v, dout, mask, scores) -> float:
    """Over output, log-sum-exp and gradients, relative to each one's norm in float64."""
    out, lse = Reference().forward(q, k, v, mask, scores)
    # Statistics of a longer sequence, as in a plan: the log-sum-exp is above that of this block alone.
    lse_all, delta = lse + 0.7, (dout.double() * out).sum(-1) * 0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    expected = out, lse, *Reference().backward(BlockGrad(dout, q, k, v, lse_all, delta, mask), scores)
    got = kernel.forward(q, k, v, mask, scores)
    got += kernel.backward(BlockGrad(dout, q, k, v, lse_all.to(wide), delta.to(wide), mask), scores)
    errors = []
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype in (wide, torch.float64)  # a log-sum-exp may be wider
        assert torch.equal(a.isneginf(), b.isneginf())
        a, b = (x.double().masked_fill(x.isneginf(), 0) for x in (a, b))
        errors.append(float((a - b).norm() / b.norm()))
    return max(errors)


@pytest.mark.parametrize("softcap", [0.0, 5.0, 30.0])
@pytest.mark.parametrize("dim,value_dim", [(64, 64), (192, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("name", MASKS)
def test_cpu_kernels_equal_the_reference(name, dim, value_dim, softcap):
    mask, rows, keys = MASKS[name]
    tensors = block(rows, keys, 2, 2, dim, value_dim, size=3.0 if softcap else 1.0)  # scores to 12
    kernel = kernel_for(CPU, torch.float32, dim, value_dim=value_dim, softcap=softcap)
    assert largest_error(kernel, *tensors, mask, Scores(dim**-0.5, softcap)) < 2e-6


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-13), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_cpu_kernels_in_every_dtype(dtype, bound, softcap):
    kernel = kernel_for(CPU, dtype, 24, value_dim=16, softcap=softcap)
    for rows in (1, 40):
        tensors = block(rows, rows, 3, 1, 24, 16, dtype)
        assert largest_error(kernel, *tensors, CAUSAL, Scores(0.2, softcap)) < bound


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("name", MASKS)
def test_the_reference_has_the_gradients_of_the_definition(name, softcap):
    """Of `attention`, by autograd; group heads of one sample stand for heads."""
    mask, rows, keys = MASKS[name]
    q, k, v, dout = block(rows, keys, 2, 2, 16, 8, torch.float64, size=4.0)
    seen = torch.ones(1, rows, keys, dtype=torch.bool)
    if isinstance(mask, KeyRanges):
        at = torch.arange(keys)
        seen = (at >= mask.first.unsqueeze(2)) & (at < mask.end.unsqueeze(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q2, k2, v2 = leaves[0], *(x.unsqueeze(2) for x in leaves[1:])
    out, lse = attention(q2, k2, v2, causal=mask == CAUSAL, scale=0.25, softcap=softcap, seen=seen)
    expected = out, lse, *torch.autograd.grad(out, leaves, dout)
    scores, delta = Scores(0.25, softcap), (dout * out.detach()).sum(-1)
    got = Reference().forward(q, k, v, mask, scores)
    got += Reference().backward(BlockGrad(dout, q, k, v, lse.detach(), delta, mask), scores)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_softcap_bounds_the_scores():
    """Scores 0.5, 8 and -40 capped at 2, by hand."""
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([0.5, 8.0, -40.0]).view(3, 1, 1), torch.eye(3).unsqueeze(1)
    for kernel in (Reference(), kernel_for(CPU, torch.float32, 1, value_dim=3, softcap=2.0)):
        out, lse = kernel.forward(q, k, v, FULL, Scores(1.0, 2.0))
        weights = [math.exp(2 * math.tanh(s / 2)) for s in (0.5, 8.0, -40.0)]
        assert out.flatten().tolist() == pytest.approx([w / sum(weights) for w in weights])
        assert lse.item() == pytest.approx(math.log(sum(weights)))


def test_large_softcap_blocks_take_little_memory(monkeypatch):
    """Tiles of one row each give the same: rows of a tile depend on the scores there are."""
    tensors = block(50, 50, 2, 2, 16, 16, size=4.0)
    monkeypatch.setattr(softcap_cpu, "SCORES", 1)
    sizes, tiles = [], softcap_cpu._tiles
    monkeypatch.setattr(softcap_cpu, "_tiles", lambda *args: (sizes.append(t.visible.shape) or t for t in tiles(*args)))
    assert (
        largest_error(softcap_cpu.SoftcapCpu(), *tensors, TWO_SAMPLES.of(slice(0, 50), slice(0, 50)), Scores(0.25, 5.0))
        < 2e-6
    )
    assert all(rows == 1 for rows, _ in sizes) and len(sizes) > 90


def test_a_softcap_is_never_ignored():
    q, k, v, dout = block(4, 4, 1, 1, 8, 8)
    lse = torch.zeros(4, 1, 1)
    for kernel, scores, message in (
        (AtenFlash(), Scores(1.0, 5.0), "softcap 5.0: PyTorch's flash attention for CPUs has no softcap"),
        (
            LIBRARIES["aten"](),
            Scores(1.0, 5.0),
            "aten: PyTorch's flash attention is called without a softcap, not with 5.0",
        ),
        (softcap_cpu.SoftcapCpu(), Scores(1.0), "softcap 0: this kernel needs capped scores"),
    ):
        with pytest.raises(UsageError, match=message):
            kernel.forward(q, k, v, FULL, scores)
        with pytest.raises(UsageError, match=message):
            kernel.backward(BlockGrad(dout, q, k, v, lse, lse, FULL), scores)
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match=f"softcap {wrong}: must be positive"):
            Scores(1.0, wrong)


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


class SixteenBits(AtenFlash):
    """Returns outputs in the dtype of the queries, as kernels on a GPU do."""

    def forward(self, q, k, v, mask, scores):
        out, lse = super().forward(q, k, v, mask, scores)
        return out.to(q.dtype), lse


class SixteenBitsWidened(SixteenBits):
    def forward(self, q, k, v, mask, scores):
        out, lse = super().forward(q, k, v, mask, scores)
        return out.float(), lse.double()


@pytest.mark.parametrize("spec,merges", [("ulysses", False), ("ring", True), ("attention2d", True), ("mesh", True)])
def test_outputs_of_16_bits_are_widened_when_something_is_added(spec, merges, monkeypatch):
    dtypes, results = set(), Executor.results

    def record(self):
        ends = yield from results(self)
        dtypes.update(ends[t][0].dtype for t in ends if t is T.O)
        return ends

    monkeypatch.setattr(Executor, "results", record)
    torch.manual_seed(0)
    shapes = (64, 1, 4, 16), (64, 1, 4, 16), (64, 1, 4, 16)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    found = []
    for kernel in (SixteenBits(), SixteenBitsWidened()):
        how = {"return_lse": True, "sinks": torch.zeros(4), "kernel": kernel}
        out, lse = context_parallel_attention(q, k, v, AllRanks(4, spec), **how)
        found.append([out, lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
        expected = torch.float32 if merges or kernel.__class__ is SixteenBitsWidened else torch.bfloat16
        assert dtypes == {expected}
        dtypes.clear()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
