"""The position kernel: exact under Triton's CPU interpreter. `tests/campaigns/compile_kernels.py` compiles it for GPUs.

The interpreter computes bfloat16 products wrongly, so bfloat16 is only compiled there.
"""

import importlib.util
from functools import partial

import pytest
import torch

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges
from megatron.context_parallel.kernels.position.kernel import precision
from megatron.context_parallel.kernels.position.tiles import Tiles
from tests.support.dense import dense_attention, visible
from tests.support.interpreter import interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted():
    with interpreter() as run:
        yield run


# -- masks ---------------------------------------------------------------------------------------------------------


def key_ranges(first, end) -> KeyRanges:
    return KeyRanges(*(torch.as_tensor(x, dtype=torch.int32).reshape(-1, S) for x in (first, end)))


def documents(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within documents of these lengths; rows beyond them see nothing."""
    first = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    first = torch.cat([first, torch.full((S - len(first),), S)])
    return first, torch.where(first < S, torch.arange(S) + 1, S)


S, T = 45, 75  # query and key rows: no multiples of a tile
ROW = torch.arange(S)
MASKS = {
    "full": FULL,
    "all_by_ranges": key_ranges(0 * ROW, 0 * ROW + T),
    **{f"step{m}": key_ranges(0 * ROW, (m * ROW + c).clamp(0, T)) for m, c in ((1, -9), (2, 1), (3, -60))},
    "window": key_ranges((ROW - 7).clamp(0), ROW + 1),
    "step_window": key_ranges((2 * ROW - 30).clamp(0, T), (2 * ROW + 3).clamp(0, T)),
    "documents": key_ranges(*documents(1, 30, 3, 1, 1, 5)),
    "two_samples": key_ranges(*(torch.stack(x) for x in zip(documents(33, 12), documents(1, 40, 4), strict=True))),
    "empty": key_ranges(0 * ROW, 0 * ROW),
}
PADDED = key_ranges(*(torch.where((ROW > 7) & (ROW < 24), 24, x) for x in (ROW // 8 * 8, ROW // 8 * 8 + 5)))  # gaps


def seen(mask, s: int, t: int) -> torch.Tensor:
    row, key = torch.arange(s)[None, :, None], torch.arange(t)
    if isinstance(mask, KeyRanges):
        return (key >= mask.first[..., None]) & (key < mask.end[..., None])
    return key <= (row if mask == CAUSAL else row * 0 + t)


# -- by definition -------------------------------------------------------------------------------------------------


def definition(q, k, v, dout, mask, scores):
    """out, lse, dq, dk, dv, and delta, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k.unsqueeze(2), v.unsqueeze(2))]
    of_samples = seen(mask, len(q), len(k))
    of_batch = of_samples.repeat_interleave(q.shape[1] // len(of_samples), 0)
    out, lse = dense_attention(*leaves, of_batch, scale=scores.scale, softcap=scores.softcap)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout.double())
    delta = (dout * out.detach()).sum(-1)
    return out.detach(), lse.detach(), dq, dk.squeeze(2), dv.squeeze(2), delta


def inputs(dtype, s=S, t=T, batch=2, group=1, d=64, dv=None, size=1.0):
    torch.manual_seed(0)
    q, dout = (torch.randn(s, batch, group, x).to(dtype) for x in (d, dv or d))
    k, v = (torch.randn(t, batch, x).to(dtype) for x in (d, dv or d))
    return q * size, k * size, v, dout


def errors(
    mask, dtype, strided=False, tiles=(32, 32), softcap=0.0, processors=1, copies=1, **shape
) -> dict[str, float]:
    """Runs in the interpreter: the largest error of each result, relative to its largest value."""
    from megatron.context_parallel.kernels.position import kernel as position

    position._copies = lambda tiles: copies
    position.FLOAT32 = position.FLOAT32._replace(rows=tiles[0], keys=tiles[1])
    q, k, v, dout = inputs(dtype, **shape)
    if strided:  # every second key row of a wider tensor, heads before rows
        k, v = (x.new_zeros(2 * len(x), x.shape[1], 96)[::2, :, : x.shape[2]].copy_(x) for x in (k, v))
        q = q.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    scores = Scores(q.shape[-1] ** -0.5, softcap)
    wanted = dict(zip(("out", "lse", "dq", "dk", "dv", "delta"), definition(q, k, v, dout, mask, scores), strict=True))
    lse, delta = wanted["lse"].float(), wanted.pop("delta").float()
    found = {}
    for deterministic in (
        (False, True) if v.shape[-1] == q.shape[-1] and not softcap else (False,)
    ):  # others have one form
        kernel = position.PositionKernel(torch.device("cpu"), deterministic=deterministic)
        kernel.processors = processors
        results = kernel.forward(q, k, v, mask, scores) if not deterministic else ()
        results += kernel.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores)
        for name, x in zip([*wanted][-len(results) :], results, strict=True):
            assert torch.equal(x.isinf(), wanted[name].isinf()), name
            x, y = (z.double().masked_fill(z.isinf(), 0) for z in (x, wanted[name]))
            found[f"{name} deterministic" if deterministic else name] = float(
                (x - y).abs().max() / (y.abs().max() or 1)
            )
    return found


@pytest.mark.parametrize("name", [name for name in MASKS if name != "step2"])  # which is below
def test_exact_for_every_mask(interpreted, name):
    batch = 2 if name == "two_samples" else 1
    found = interpreted(partial(errors, batch=batch), MASKS[name], torch.float32)
    assert all(error < 2e-6 for error in found.values()), found


def test_exact_as_triton_3_6_reads_numbers_of_rows(interpreted):
    found = interpreted(partial(errors, batch=2, copies=4), MASKS["two_samples"], torch.float32)
    assert all(error < 2e-6 for error in found.values()), found


def test_triton_3_6_gets_a_copy_for_each_thread(monkeypatch):
    triton = pytest.importorskip("triton")
    from megatron.context_parallel.kernels.position import kernel as position

    for version, copies in (("3.6.0", (4, 2, 16)), ("3.7.1", (1, 1, 1)), ("3.9.0", (1, 1, 1))):
        monkeypatch.setattr(triton, "__version__", version)
        tiles = (Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(16, 128, 8, 2))
        assert tuple(map(position._copies, tiles)) == copies


def test_exact_causal_square(interpreted):
    found = interpreted(partial(errors, s=S, t=S), CAUSAL, torch.float32)
    assert all(error < 2e-6 for error in found.values()), found


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("step3", {"group": 4, "batch": 1}),
        ("two_samples", {"group": 2, "batch": 4, "d": 80}),  # two key/value heads of each sample
        ("step2", {"d": 96, "dv": 80, "strided": True, "softcap": 5.0, "size": 3.0, "batch": 1}),
        ("documents", {"tiles": (16, 64), "batch": 1}),
        ("step_window", {"tiles": (64, 16), "batch": 1}),
        # Query heads in parts: 3 key tiles and 2 key/value heads, two parts of two; one key/value head, four of one
        ("two_samples", {"group": 4, "processors": 12}),
        ("step2", {"group": 4, "batch": 1, "processors": 132, "dv": 80}),
    ],
)
def test_exact_for_every_shape(interpreted, name, shape):
    found = interpreted(partial(errors, **shape), MASKS[name], torch.float32)
    assert all(error < 2e-6 for error in found.values()), found


@pytest.mark.parametrize(
    ("name", "d", "dv", "softcap"),
    [
        ("full", 192, 128, 0.0),
        ("causal", 64, 128, 30.0),
        ("two_samples", 128, 64, 5.0),
        ("documents", 64, 64, 5.0),
    ],
)
def test_exact_for_value_heads_of_another_size_and_softcap(interpreted, name, d, dv, softcap):
    mask = MASKS.get(name, CAUSAL)
    how = {"d": d, "dv": dv, "softcap": softcap, "group": 2, "size": 2.0 if softcap else 1.0}  # scores to 16
    how["batch"] = 2 if name == "two_samples" else 1
    found = interpreted(partial(errors, t=S if mask == CAUSAL else T, **how), mask, torch.float32)
    bar = 5e-6 if softcap else 2e-6  # float32 rounds scores of 16 by 1e-6, and processors round products differently
    assert all(error < bar for error in found.values()), found


def few_rows(
    dtype: torch.dtype, s: int, group: int, mask, t: int = 300, dv: int = 64, processors: int = 20, **how
) -> list[float]:
    """Errors of out and lse with keys split over the multiprocessors, and how many parts there were."""
    from unittest.mock import patch

    from megatron.context_parallel.kernels.position import few_rows as device
    from megatron.context_parallel.kernels.position import kernel as position

    q, k, v, dout = inputs(dtype, s=s, t=t, group=group, dv=dv)
    scores = Scores(0.125, **how)
    kernel = position.PositionKernel(torch.device("cpu"))
    kernel.processors = processors
    with patch.object(device.merge_parts_kernel, "run", wraps=device.merge_parts_kernel.run) as merged:
        out, lse = kernel.forward(q, k, v, mask, scores)
    wanted = definition(q, k, v, dout, mask, scores)
    assert out.dtype == dtype and torch.equal(lse.isinf(), wanted[1].isinf())
    found = [(x.double() - y).nan_to_num(0).abs().max() for x, y in zip((out, lse), wanted, strict=False)]
    return [*map(float, found), merged.call_args.args[4]]


def random_ranges(s: int, t: int) -> KeyRanges:
    """Rows that see a window, and one that sees nothing."""
    end = torch.linspace(5, t, s).int()
    first = (end - 40).clamp(0)
    end[s // 2] = first[s // 2]
    return KeyRanges(first[None], end.cummax(0).values[None])


@pytest.mark.parametrize(
    ("s", "group", "t", "expected"),
    [(1, 8, 300, 10), (4, 3, 77, 3), (15, 5, 100, 4), (15, 2, 15, 1)],  # tiles have 32 keys
)
def test_few_rows_split_the_keys(interpreted, s, group, t, expected):
    masks = (
        [FULL, random_ranges(s, t)]
        + [CAUSAL] * (s == t)
        + [KeyRanges(*torch.zeros(2, 1, s, dtype=torch.int32))] * (s == 4)
    )
    for mask in masks:
        out, lse, parts = interpreted(partial(few_rows, t=t), torch.float32, s, group, mask)
        assert out < 2e-6 and lse < 2e-6
        assert parts == expected


def test_few_rows_of_other_sizes(interpreted):
    for how in ({"dv": 80}, {"dv": 192, "softcap": 5.0}):
        out, lse, _ = interpreted(partial(few_rows, **how), torch.float32, 3, 2, FULL)
        assert out < 2e-6 and lse < 2e-6
    out, lse, _ = interpreted(few_rows, torch.float16, 5, 4, FULL)
    assert out < 2e-3 and lse < 2e-3
    out, lse, parts = interpreted(partial(few_rows, t=128, processors=4), torch.float32, 15, 5, FULL)
    assert out < 2e-6 and lse < 2e-6 and parts == 2  # 6 programs for the rows: two parts occupy all multiprocessors


def saturation() -> list[float]:
    """One key to each row, capped at 1: gradients go with 1 - tanh², down to where tanh rounds to 1."""
    from megatron.context_parallel.kernels.position import PositionKernel

    raw = torch.tensor([1e-4, 0.2, 0.3, 1.0, 4.0, 12.0, -0.2, -4.0])
    q, k = torch.zeros(8, 1, 1, 64), torch.zeros(8, 1, 64)
    q[..., 0], k[..., 0] = raw.view(8, 1, 1), 1.0
    row = torch.arange(8, dtype=torch.int32)[None]
    mask, ones = KeyRanges(row, row + 1), torch.ones(8, 1, 1, 64)
    kernel, scores = PositionKernel(torch.device("cpu")), Scores(1.0, 1.0)
    _, lse = kernel.forward(q, k, ones[:, 0], mask, scores)
    delta = torch.full((8, 1, 1), 63.0)  # 1 less than dout * v: dS is p times the slope
    dq, _, _ = kernel.backward(BlockGrad(ones, q, k, ones[:, 0], lse, delta, mask), scores)
    tanh = raw.double().tanh()
    return [*(lse.flatten() / tanh - 1).tolist(), *(dq[..., 0].flatten() * raw.double().cosh() ** 2 - 1).tolist()]


def test_small_and_saturated_scores_keep_their_digits(interpreted):
    assert all(abs(error) < 3e-6 for error in interpreted(saturation))


def test_exact_in_float16(interpreted):
    found = interpreted(errors, MASKS["step2"], torch.float16)
    assert found["lse"] < 1e-6
    assert all(error < 2e-3 for error in found.values()), found


def test_large_scores(interpreted):
    """Scores of 1e4, where float32 itself resolves 1e-3."""
    found = interpreted(partial(errors, size=70.0), MASKS["step2"], torch.float32)
    assert all(error < 2e-3 for error in found.values()), found


def through_a_plan() -> list[float]:
    """Errors of out, lse, dq, dk, dv of 4 ranks: head_dim 80, values of 64, a softcap, documents and padding."""
    from megatron.context_parallel import AllRanks, context_parallel_attention
    from megatron.context_parallel.kernels.position import PositionKernel
    from megatron.context_parallel.tokens.documents import Documents

    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(64, 1, *x) for x in ((2, 80), (1, 80), (1, 64), (2, 64)))
    ids = torch.tensor([0] * 30 + [-1] * 7 + [1] * 20 + [-1] * 7)
    documents, seen = Documents(ids), visible(torch.arange(64), torch.arange(64), documents=ids)
    k, v = (x.masked_fill((ids < 0).view(-1, 1, 1, 1), float("nan")) for x in (k, v))  # no query sees padding
    cp, kernel = AllRanks(4, "attention2d", "zigzag"), PositionKernel(torch.device("cpu"))
    found = []
    for function, tensors in (
        (
            lambda *x: context_parallel_attention(
                *x, cp, documents=documents, softcap=3.0, return_lse=True, kernel=kernel
            ),
            (4 * q, k, v),
        ),
        (
            lambda *x: dense_attention(*x, seen, softcap=3.0),
            (4 * q.double(), k.double().nan_to_num(), v.double().nan_to_num()),
        ),
    ):
        leaves = [x.requires_grad_() for x in tensors]
        out, lse = function(*leaves)
        results = [out, lse, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]
        found.append([x.detach().double().nan_to_num(nan=float("inf"), neginf=0.0) for x in results])
    return [float((x - y).norm() / y.norm()) for x, y in zip(*found, strict=True)]


def test_exact_through_a_plan(interpreted):
    assert all(error < 2e-6 for error in interpreted(through_a_plan))


# -- tiles ---------------------------------------------------------------------------------------------------------


def unseen_are_not_read() -> list[bool]:
    """Query and key tiles of 32, causal: NaN in rows that no query sees changes nothing else."""
    from megatron.context_parallel.kernels.position import PositionKernel

    q, k, v, dout = inputs(torch.float32, s=96, t=96)
    *wanted, delta = definition(q, k, v, dout, CAUSAL, Scores(0.125))
    lse, delta = wanted[1].float(), delta.float()
    late_k, late_v = (x.clone().index_fill_(0, torch.arange(32, 96), float("nan")) for x in (k, v))
    early_q, early_dout = (x.clone().index_fill_(0, torch.arange(64), float("nan")) for x in (q, dout))
    good = []
    for deterministic in (False, True):
        kernel = PositionKernel(torch.device("cpu"), deterministic=deterministic)
        out, _ = kernel.forward(q, late_k, late_v, CAUSAL, Scores(0.125))
        _, dk, dv = kernel.backward(BlockGrad(early_dout, early_q, k, v, lse, delta, CAUSAL), Scores(0.125))
        pairs = [(out[:32], wanted[0][:32]), (dk[64:], wanted[3][64:]), (dv[64:], wanted[4][64:])]
        if deterministic:
            dq, _, _ = kernel.backward(BlockGrad(dout, q, late_k, late_v, lse, delta, CAUSAL), Scores(0.125))
            pairs.append((dq[:32], wanted[2][:32]))
        good += [bool((x - y).abs().max() < 1e-5) for x, y in pairs]
    return good


def test_tiles_that_nobody_sees_are_not_read(interpreted):
    assert all(interpreted(unseen_are_not_read))


def rows_nobody_sees_do_not_matter() -> list[bool]:
    """Bit for bit, with NaN in keys that no row sees and in queries that see nothing."""
    from megatron.context_parallel.kernels.position import PositionKernel

    good = []
    cases = [(MASKS["documents"], 64, 0.0, False), (MASKS["two_samples"], 64, 0.0, True)]
    cases += [(MASKS["step_window"], 64, 0.0, False), (PADDED, 64, 0.0, False), (PADDED, 64, 0.0, True)]
    for mask, dv, softcap, deterministic in [*cases, (PADDED, 80, 0.0, True), (PADDED, 80, 5.0, False)]:
        batch = len(mask.first)
        (q, k, v, dout), scores = inputs(torch.float32, batch=batch, dv=dv), Scores(0.125, softcap)
        keys, rows = seen(mask, S, T).any(1), seen(mask, S, T).any(2)  # [samples, t], [samples, s]
        keys, rows = keys.T, rows.T
        bad_k, bad_v = (x.masked_fill(~keys[..., None], float("nan")) for x in (k, v))
        bad_q, bad_dout = (x.masked_fill(~rows[..., None, None], y) for x, y in ((q, float("nan")), (dout, 3e38)))
        kernel = PositionKernel(torch.device("cpu"), deterministic=deterministic)
        out, lse = kernel.forward(q, k, v, mask, scores)
        delta = (dout * out).sum(-1)
        wanted = (out, lse, *kernel.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores))
        got = kernel.forward(bad_q, bad_k, bad_v, mask, scores)
        got += kernel.backward(BlockGrad(bad_dout, bad_q, bad_k, bad_v, lse, delta, mask), scores)
        good += [torch.equal(x, y) for x, y in zip(got, wanted, strict=True)]
    return good


def test_rows_that_nobody_sees_do_not_matter(interpreted):
    assert all(interpreted(rows_nobody_sees_do_not_matter))


def test_what_kernels_read_of_key_ranges_is_computed_once():
    from megatron.context_parallel.kernels.position import kernel

    end = torch.tensor([[1, 2, 4]], dtype=torch.int32)
    ranges, others = KeyRanges(end * 0, end), KeyRanges(end * 0 + 1, end)
    made = kernel._once(kernel._seen_keys, ranges, 5)
    assert made.tolist() == [[True] * 4 + [False]]
    assert kernel._once(kernel._seen_keys, ranges, 5) is made
    assert kernel._once(kernel._seen_keys, others, 5).tolist() == [[False] + [True] * 3 + [False]]
    assert kernel._once(kernel._rows_seeing, ranges, 4, 2).shape == (1, 4, 2)
    before = len(kernel._of_key_ranges)
    del ranges, others, end
    assert len(kernel._of_key_ranges) == before - 1


def full_tiles_ignore_runs() -> float:
    """A row inside a query tile claims to see few keys: only the first and the last row of a tile are checked."""
    from megatron.context_parallel.kernels.position import PositionKernel

    q, k, v, _ = inputs(torch.float32, s=32, t=64)
    end = torch.full((1, 32), 64, dtype=torch.int32)
    end[0, 10] = 5
    out, _ = PositionKernel(torch.device("cpu")).forward(q, k, v, KeyRanges(end * 0, end), Scores(0.125))
    return float((out - definition(q, k, v, q, FULL, Scores(0.125))[0]).abs().max())


def test_tiles_that_all_see_are_not_masked(interpreted):
    assert interpreted(full_tiles_ignore_runs) < 1e-5


# -- refusals, pieces ----------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    from megatron.context_parallel.kernels.position import PositionKernel

    kernel, said = PositionKernel(torch.device("cpu")), []
    q, k, v, _ = inputs(torch.float32)
    for args, scale in (
        ((q[..., :56], k[..., :56], v[..., :56], FULL), 1.0),
        ((q, k.half(), v, FULL), 1.0),
        ((q, k.mT.contiguous().mT, v, FULL), 1.0),
        ((q, k, v, CAUSAL), 1.0),
        ((q, k, v, FULL), -1.0),
        ((q[1:], k, v, MASKS["step2"]), 1.0),
        ((q, k, v[..., :40], FULL), 1.0),
    ):
        try:
            kernel.forward(*args, Scores(scale))
            said.append("accepted")
        except UsageError as error:
            said.append(str(error))
    return said


def test_refusals_name_what_is_wrong(interpreted):
    said = interpreted(refusals)
    words = (
        "head_dim 56",
        "torch.float16",
        "contiguous",
        "must be square",
        "-1.0",
        "[1 or batch, 44]",
        "value head_dim 40",
    )
    for word, text in zip(words, said, strict=True):
        assert word in text


def pieces(mask: KeyRanges) -> list:
    from megatron.context_parallel.kernels.position import PositionKernel

    return PositionKernel(torch.device("cpu")).pieces(mask, T)


def test_a_block_is_one_piece(interpreted):
    (piece,) = interpreted(pieces, MASKS["documents"])
    assert (piece.q, piece.kv, piece.sample) == (slice(0, S), slice(0, T), None)
    assert torch.equal(piece.mask.end, MASKS["documents"].end)


def test_runs_reach_the_gpu_in_one_copy_that_nothing_waits_for(monkeypatch):
    from megatron.context_parallel.kernels.position import PositionKernel

    calls, kernel = [], PositionKernel.__new__(PositionKernel)
    kernel.device = torch.device("cuda", 1)
    for name in ("pin_memory", "to"):
        monkeypatch.setattr(torch.Tensor, name, lambda x, *a, name=name, **k: calls.append((name, x.shape, a, k)) or x)
    block = KeyRanges(torch.zeros(2, 5, dtype=torch.int32), torch.arange(10, dtype=torch.int32).view(2, 5))
    ((rows, keys, ranges, _),) = kernel.pieces(block, 7)
    assert (rows, keys) == (slice(0, 5), slice(0, 7)) and all(map(torch.equal, ranges, block))
    assert calls == [("pin_memory", (2, 2, 5), (), {}), ("to", (2, 2, 5), (kernel.device,), {"non_blocking": True})]


def test_needs_a_gpu_it_has_tiles_for():
    from megatron.context_parallel.kernels.position import PositionKernel

    with pytest.raises(UsageError, match=r"8\.0, 9\.0 and 10\.x"):
        PositionKernel(torch.device("cpu"))


# -- statistics ----------------------------------------------------------------------------------------------------


def parts() -> list[int]:
    from megatron.context_parallel.kernels.position.kernel import _parts_of_group

    cases = (200, 8), (132, 8), (100, 8), (64, 8), (64, 6), (30, 6), (1, 8), (1, 1)  # programs, query heads of a group
    return [_parts_of_group((1, programs), group, 132) for programs, group in cases]


@pytest.mark.parametrize("name,allowed,refused", [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")])
def test_float32_is_multiplied_as_pytorch_is_told_in_either_way(name, allowed, refused):
    single, matmul = torch.zeros(1), torch.backends.cuda.matmul
    try:
        for value, expected in ((allowed, "tf32"), (refused, "ieee")):
            setattr(matmul, name, value)
            assert (precision(single), precision(single.half())) == (expected, "ieee")
    finally:
        matmul.allow_tf32 = False


def test_query_heads_are_split_until_each_multiprocessor_has_a_program(interpreted):
    assert interpreted(parts) == [1, 1, 2, 4, 3, 6, 8, 1]


def statistics() -> list[bool]:
    from megatron.context_parallel.kernels.delta_triton import by_head

    torch.manual_seed(0)
    lse, delta = torch.randn(300, 4, 3).masked_fill_(torch.rand(300, 4, 3) < 0.1, float("-inf")), torch.randn(300, 2, 3)
    lse = lse[7:290, 1:3]  # rows and heads of a piece
    lse2, delta2 = by_head(lse, delta[:283].double())
    wanted = (x.permute(1, 2, 0).reshape(6, -1) for x in (lse * 1.4426950408889634, delta[:283]))
    return [torch.equal(x, y) for x, y in zip((lse2, delta2), wanted, strict=True)]


def test_statistics_by_head_have_the_same_bits(interpreted):
    assert all(interpreted(statistics))


def stand_ins(size: float) -> tuple[float, float]:
    """Errors of delta and of the stand-in itself, relative to |dout| |out|, of float32 gradients and of float16."""
    from megatron.context_parallel.kernels.delta import output_with
    from megatron.context_parallel.kernels.delta_triton import output_with_fused

    torch.manual_seed(0)
    dout, out = torch.randn(40, 6, 2, 80) * size, torch.randn(37, 2, 2, 80)
    dout = dout[3:, 2:4]
    dout[5] = 0
    delta = (dout.double() * out).sum(-1)
    fused = output_with_fused(delta.float(), dout)
    assert fused.isfinite().all() and not fused[5].any()
    got = (dout.double() * fused).sum(-1)
    norm = (dout.double().norm(dim=-1) * out.norm(dim=-1)).clamp_min(1e-300)
    half = dout.to(torch.float16) if size == 1 else dout
    difference = output_with_fused(delta.float(), half).double() - output_with(delta.float(), half)
    return float(((got - delta) / norm).abs().max()), float(difference.abs().max())


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e19])
def test_fused_stand_in_has_the_row_sums_of_the_output(interpreted, size):
    error, difference = interpreted(stand_ins, size)
    assert error < 1e-6 and difference < (2e-3 if size == 1 else 1e-6)


# -- merging -------------------------------------------------------------------------------------------------------


def merged(size: float) -> tuple[float, float]:
    from megatron.context_parallel.kernels.merge import merge
    from megatron.context_parallel.kernels.merge_triton import merge_fused

    torch.manual_seed(1)
    out, other = torch.randn(37, 2, 3, 80), torch.randn(2, 37, 3, 96).half().transpose(0, 1)[..., :80]
    lse, other_lse = torch.randn(37, 2, 3) * size, torch.randn(37, 2, 3) * size
    lse[:9] = other_lse[5:20] = float("-inf")
    out[:9] = 7
    wide_out, wide_lse = out.double(), lse.double()
    merge(wide_out, wide_lse, other, other_lse.double())
    merge_fused(out, lse, other, other_lse)
    assert torch.equal(lse.isinf(), wide_lse.isinf())
    error = (lse - wide_lse).nan_to_num_(0).abs().max()
    return float((out - wide_out).abs().max()), float(error)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_fused_merge(interpreted, size):
    out, lse = interpreted(merged, size)
    assert out < 1e-6 * 8
    assert lse <= 1e-7 * 8 * size


def merged_beside_a_sink() -> float:
    from megatron.context_parallel.kernels.merge_triton import merge_fused

    torch.manual_seed(1)
    other, gap = torch.zeros(37, 2, 3, 80), torch.rand(37, 2, 3) * 9 + 5  # weights of 1e-2 to 1e-6
    lse, out = torch.randn(37, 2, 3), torch.randn(37, 2, 3, 80)
    wanted = out.double() * torch.sigmoid(lse.double() - (lse + gap).double())[..., None]
    merge_fused(out, lse, other, lse + gap)
    return float(((out - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def test_fused_merge_keeps_the_digits_of_small_weights(interpreted):
    assert interpreted(merged_beside_a_sink) < 1e-6
