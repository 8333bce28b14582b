"""Attention libraries for CUDA, replaced by fakes with their signatures and layouts, and which one is chosen."""

import importlib.metadata
import importlib.util
import logging
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from megatron.context_parallel import UsageError
from megatron.context_parallel.kernels import choose
from megatron.context_parallel.kernels.choose import LibraryAndPosition, check_backend, kernel_for
from megatron.context_parallel.kernels.delta import output_with
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.libraries import LIBRARIES
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, Piece
from megatron.context_parallel.kernels.names import BACKENDS
from megatron.context_parallel.kernels.position.tiles import TILES
from megatron.context_parallel.kernels.reference import Reference

BF16, F32 = torch.bfloat16, torch.float32


# ------------------------------------------------------------------------- attention as the libraries define it


def attend(q, k, v, causal, scale):
    """[1, s, heads, d], [1, t, kv_heads, d] to out and the natural log-sum-exp [1, heads, s]."""
    assert all(x.stride(-1) == 1 and x.dim() == 4 for x in (q, k, v))
    weights, lse = probabilities(q, k, causal, scale)
    out = torch.einsum("zhij,zjhd->zihd", weights, repeated(v, q))
    return out.to(q.dtype), lse


def gradients(dout, q, k, v, out, lse, causal, scale):
    """dq, dk, dv; the output is used in rowsum(dout * out) alone."""
    assert lse.is_contiguous() and lse.dtype == F32 and lse.shape == (1, q.shape[2], q.shape[1])
    weights, _ = probabilities(q, k, causal, scale, lse)
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    dweights = torch.einsum("zihd,zjhd->zhij", dout.double(), repeated(v, q).double())
    dscores = weights.double() * (dweights - delta.unsqueeze(-1)) * scale
    dq = torch.einsum("zhij,zjhd->zihd", dscores, repeated(k, q).double())
    dk = torch.einsum("zhij,zihd->zjhd", dscores, q.double())
    dv = torch.einsum("zhij,zihd->zjhd", weights.double(), dout.double())
    group = q.shape[2] // k.shape[2]
    return [x.to(q.dtype) for x in (dq, dk.unflatten(2, (-1, group)).sum(3), dv.unflatten(2, (-1, group)).sum(3))]


def probabilities(q, k, causal, scale, lse=None):
    scores = torch.einsum("zihd,zjhd->zhij", q.double(), repeated(k, q).double()) * scale
    if causal:
        assert q.shape[1] == k.shape[1]
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse.double()
    return (scores - lse.unsqueeze(-1)).exp().to(q.dtype), lse.float()


def repeated(x, q):
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2).to(q.dtype)


def fill(into, values):
    for a, b in zip(into, values, strict=True):
        a.copy_(b)


# --------------------------------------------------------------------------------- the libraries, by signature


class Aten:
    """Argument order of the operators' schemas; test_real_operators_take_our_arguments has the real ones."""

    def __init__(self, stats_dims=3):
        self.stats_dims = stats_dims

    def _flash_attention_forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale):
        assert (cum_q, cum_k, max_q, max_k, dropout, debug) == (None, None, q.shape[1], k.shape[1], 0.0, False)
        return *attend(q, k, v, causal, scale), None, None, None

    def _flash_attention_backward(
        self, dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale
    ):
        assert (cum_q, cum_k, max_q, max_k, dropout) == (None, None, q.shape[1], k.shape[1], 0.0)
        return gradients(dout, q, k, v, out, lse, causal, scale)

    def _scaled_dot_product_cudnn_attention(self, q, k, v, bias, with_lse, dropout, causal, *, scale):
        assert bias is None and with_lse and dropout == 0.0
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return out.transpose(1, 2), lse.unsqueeze(-1) if self.stats_dims == 4 else lse, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
    ):
        assert (bias, cum_q, cum_k, max_q, max_k, dropout) == (None, None, None, q.shape[2], k.shape[2], 0.0)
        assert lse.dim() == self.stats_dims
        rows_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = gradients(*rows_first, lse.reshape(lse.shape[:3]), causal, scale)
        return [x.transpose(1, 2) for x in grads]


def flash2():
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, -1, -1, 0, None)
        return *attend(q, k, v, causal, softmax_scale), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, -1, -1, 0, None)
        fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, causal, softmax_scale))

    return SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


def flash3():
    def fwd(q, k, v, *, softmax_scale=None, is_causal=False, num_splits=0, sm_margin=0):
        return *attend(q, k, v, is_causal, softmax_scale), torch.empty(0), torch.empty(0)

    def bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, *, softmax_scale=None, is_causal=False, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        fill((dq, dk, dv), gradients(dout, q, k, v, out, softmax_lse, is_causal, softmax_scale))

    return SimpleNamespace(fwd=fwd, bwd=bwd)


def flash4():
    def _flash_attn_fwd(q, k, v, qv=None, *, softmax_scale=None, causal=False, return_lse=False):
        return *attend(q, k, v, causal, softmax_scale), None, None, None

    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, deterministic=False):
        return gradients(dout, q, k, v, out, lse, causal, softmax_scale)

    return SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)


FAKES = {"flash2": flash2, "flash3": flash3, "flash4": flash4}


def fake(name, monkeypatch, stats_dims=3):
    """The backend over a fake of its library."""
    library = LIBRARIES[name]
    if name in ("aten", "cudnn"):
        monkeypatch.setattr(sys.modules[library.__module__], "_aten", Aten(stats_dims))
        return library()
    monkeypatch.setitem(sys.modules, library.module, SimpleNamespace())
    backend = library()
    backend.calls = FAKES[name]()
    return backend


# ------------------------------------------------------------------------------------------------ the same math


def block(rows, keys, heads, group, dim, dtype=F32):
    torch.manual_seed(rows + keys)
    q, dout = (torch.randn(rows, heads, group, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(keys, heads, dim).to(dtype) for _ in range(2))
    return q, k, v, dout


def strided(q, k, v, dout):
    """The same rows out of larger tensors, keys in steps, some heads: as pieces of blocks are."""
    wide = [torch.empty(len(x) * 3 + 2, x.shape[1] + 2, *x.shape[2:], dtype=x.dtype) for x in (q, k, v, dout)]
    steps = (1, 3, 3, 1)
    views = [w[1 : 1 + len(x) * step : step, 1:-1] for w, x, step in zip(wide, (q, k, v, dout), steps, strict=True)]
    fill(views, (q, k, v, dout))
    return views


CASES = [(FULL, 5, 9, 3, 2), (CAUSAL, 7, 7, 2, 4), (FULL, 4, 1, 1, 1), (CAUSAL, 1, 1, 2, 1)]


@pytest.mark.parametrize("name,stats_dims", [*((name, 3) for name in LIBRARIES), ("cudnn", 4)])
@pytest.mark.parametrize("views", [False, True], ids=["whole", "strided"])
@pytest.mark.parametrize("mask,rows,keys,heads,group", CASES)
def test_backends_equal_the_reference(name, stats_dims, views, mask, rows, keys, heads, group, monkeypatch):
    backend, reference, scores = fake(name, monkeypatch, stats_dims), Reference(), Scores(0.3)
    q, k, v, dout = strided(*block(rows, keys, heads, group, 8)) if views else block(rows, keys, heads, group, 8)
    out, lse = reference.forward(q, k, v, mask, scores)
    # Statistics of a longer sequence, as in a plan: the log-sum-exp is above that of this block alone.
    lse_all, delta = lse + 0.7, (dout.double() * out).sum(-1) * 0.5
    got = backend.forward(q, k, v, mask, scores)
    got += backend.backward(BlockGrad(dout, q, k, v, lse_all.float(), delta.float(), mask), scores)
    expected = out, lse, *reference.backward(BlockGrad(dout, q, k, v, lse_all, delta, mask), scores)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= 2e-6 * b.norm() + 1e-7


@pytest.mark.parametrize("name", ["aten", "cudnn"])
def test_real_operators_take_our_arguments(name):
    """On the meta device PyTorch checks arguments against the schemas and says the shapes, without a GPU."""
    q, k, v, dout = (x.to("meta") for x in block(6, 10, 2, 4, 16, BF16))
    backend = LIBRARIES[name]()
    out, lse = backend.forward(q, k, v, FULL, Scores(0.1))
    assert out.shape == q.shape and out.dtype == BF16 and lse.shape == q.shape[:3] and lse.dtype == F32
    grads = backend.backward(BlockGrad(dout, q, k, v, lse, lse, FULL), Scores(0.1))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_plain_blocks_reach_the_library_without_copies(monkeypatch):
    seen = []

    def record(q, k, v, *_, **__):
        seen.extend((q, k, v))
        return attend(q, k, v, False, 1.0)

    monkeypatch.setattr(
        sys.modules[LIBRARIES["aten"].__module__], "_aten", SimpleNamespace(_flash_attention_forward=record)
    )
    q, k, v, _ = strided(*block(5, 9, 3, 2, 8))
    LIBRARIES["aten"]().forward(q, k, v, FULL, Scores(1.0))
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize("dtype,bound", [(F32, 1e-6), (torch.float16, 2e-3), (BF16, 1e-2)])
def test_stand_in_has_the_row_sums_of_the_output(dtype, bound):
    torch.manual_seed(0)
    dout, out = torch.randn(50, 3, 2, 64).to(dtype), torch.randn(50, 3, 2, 64)
    dout[7] = 0
    dout[8] *= 1e-4 if dtype != torch.float16 else 1e-2  # gradients are small; the stand-in must not be large for it
    delta = (dout.float() * out).sum(-1)
    stand_in = output_with(delta, dout)
    assert stand_in.dtype == dtype and stand_in.isfinite().all() and not stand_in[7].any()
    assert (stand_in.float().norm(dim=-1) <= out.norm(dim=-1) * 1.01).all()
    got = (dout.float() * stand_in.float()).sum(-1)
    assert ((got - delta).abs() <= bound * delta.abs().amax(-1, keepdim=True).clamp_min(1e-9)).all()


@pytest.mark.parametrize("most,margin", [(None, 0), ("16", 16)])
def test_flash3_leaves_room_for_nccl(most, margin, monkeypatch):
    if most is None:
        monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    else:
        monkeypatch.setenv("NCCL_MAX_CTAS", most)
    backend, margins = fake("flash3", monkeypatch), []
    real = vars(backend.calls).copy()
    for name in ("fwd", "bwd"):

        def record(*args, name=name, sm_margin, **how):
            margins.append(sm_margin)
            return real[name](*args, **how)

        setattr(backend.calls, name, record)
    q, k, v, dout = block(4, 4, 1, 1, 8)
    _, lse = backend.forward(q, k, v, FULL, Scores(1.0))
    backend.backward(BlockGrad(dout, q, k, v, lse, lse, FULL), Scores(1.0))
    assert margins == [margin, margin]
    monkeypatch.setenv("NCCL_MAX_CTAS", "few")
    with pytest.raises(UsageError, match="NCCL_MAX_CTAS=few: must be a count"):
        fake("flash3", monkeypatch)


# ------------------------------------------------------------------------------------------------- the choice


class Position:
    """Stands in for the position kernel."""

    name = "position"

    def pieces(self, block, keys):
        return ["one launch"]

    def forward(self, q, k, v, mask, scores):
        return "position"


@pytest.fixture
def gpu(monkeypatch):
    """A host with a GPU of some capability and some libraries: `gpu((9, 0), "flash3")`; PyTorch's are there."""

    def pretend(capability, *installed, triton=True, of_triton="3.9.0"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        for name, library in LIBRARIES.items():
            there = name in ("aten", "cudnn", *installed)
            monkeypatch.setattr(
                library, "missing", lambda dim, there=there, name=name: None if there else f"{name} is missing"
            )
            if name in installed:
                monkeypatch.setitem(sys.modules, library.module, SimpleNamespace())
        monkeypatch.setattr(choose, "_position", lambda device, need: Position())
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: triton or None if name == "triton" else find(name)
        )
        if find("triton"):
            monkeypatch.setattr("triton.__version__", of_triton)
        choose._kernel.cache_clear()

    yield pretend
    choose._kernel.cache_clear()


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "capability,installed,dtype,head_dim,expected",
    [
        ((9, 0), ("flash2", "flash3", "flash4"), BF16, 128, "flash3+position"),
        ((9, 0), ("flash2",), BF16, 128, "cudnn+position"),
        ((9, 0), (), torch.float16, 256, "cudnn+position"),
        ((9, 0), (), torch.float16, 192, "aten+position"),
        ((10, 0), ("flash2", "flash4"), BF16, 128, "cudnn+position"),
        ((10, 3), ("flash2",), BF16, 192, "flash2+position"),
        ((10, 3), ("flash4",), BF16, 192, "aten+position"),
        ((10, 3), ("flash4",), BF16, 256, "cudnn+position"),
        ((8, 0), ("flash2", "flash3"), BF16, 64, "flash2+position"),
        ((8, 0), (), BF16, 64, "aten+position"),
        ((8, 9), (), BF16, 96, "aten"),
        ((8, 0), (), F32, 96, "position"),
        ((9, 0), ("flash3",), F32, 128, "position"),
        ((9, 0), (), BF16, 40, "aten"),
        ((12, 0), (), BF16, 128, "aten"),
    ],
)
def test_auto_takes_the_fastest_that_can(capability, installed, dtype, head_dim, expected, gpu):
    gpu(capability, *installed)
    assert kernel_for(CUDA, dtype, head_dim).name == expected


def test_choice_and_reason_are_logged_once_on_rank_0(gpu, caplog, monkeypatch):
    gpu((9, 0))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            kernel_for(CUDA, BF16, 128)
        assert [r.getMessage() for r in caplog.records] == [
            "--cp-attention-backend auto: cuDNN attention through PyTorch for full and causal blocks of whole and half "
            "chunks in multiples of 128 rows; not flash3: flash3 is missing; the position kernel for other blocks"
        ]
        monkeypatch.setenv("RANK", "1")
        kernel_for(CUDA, BF16, 64)
        assert len(caplog.records) == 1


@pytest.mark.parametrize("name", [*LIBRARIES, "triton"])
def test_named_backend_is_taken(name, gpu):
    gpu((9, 0), *LIBRARIES)
    assert kernel_for(CUDA, BF16, 128, name).name == {"triton": "position"}.get(name, name)


@pytest.mark.parametrize(
    "capability,backend,dtype,head_dim,irregular,message",
    [
        ((9, 0), "flash4", BF16, 64, None, "flash4: flash4 is missing; give --cp-attention-backend aten"),
        (
            (8, 0),
            "flash3",
            BF16,
            64,
            None,
            "flash3: flash-attn 3 does not run on sm_80; give --cp-attention-backend aten",
        ),
        ((9, 0), "cudnn", F32, 64, None, "cudnn: .* does not support float32; give --cp-attention-backend triton"),
        (
            (10, 0),
            "cudnn",
            BF16,
            192,
            None,
            "on sm_100 supports head_dim 128 at most or 256, not 192; give .*aten",
        ),
        ((8, 6), "aten", BF16, 256, None, "PyTorch's flash attention on sm_86 supports head_dim 192 at most, not 256;"),
        ((9, 0), "aten", BF16, 65, None, "multiple of 8, not 65; give --kv-channels 80"),
        ((9, 0), "triton", BF16, 72, None, "head_dim 64, 80.* not 72; give --cp-attention-backend aten"),
        ((9, 0), "flash2", BF16, 64, "--window-size 512", "no mask for --window-size 512; give .*-backend triton"),
        ((9, 0), "auto", F32, 32, None, "auto: the position kernel supports head_dim .* not 32; give --kv-channels 64"),
        ((8, 6), "auto", BF16, 256, None, "auto: the position kernel does not run on sm_86; give --kv-channels 128"),
        ((12, 0), "auto", F32, 64, None, "auto: .* does not run on sm_120; give --bf16"),
        ((9, 0), "fast", BF16, 64, None, "fast: unknown; choose one of auto, aten, cudnn, flash2"),
    ],
)
def test_backend_that_cannot_names_one_that_can(capability, backend, dtype, head_dim, irregular, message, gpu):
    gpu(capability)
    with pytest.raises(UsageError, match=message) as error:
        check_backend(backend, dtype, head_dim, device="cuda", irregular=irregular)
    assert str(error.value).startswith(f"--cp-attention-backend {backend}: ") and "\n" not in str(error.value)


def test_other_value_heads_and_softcap_are_the_position_kernel_s(gpu, caplog):
    gpu((9, 0), "flash3")
    with caplog.at_level(logging.INFO):
        assert kernel_for(CUDA, BF16, 192, value_dim=128).name == "position"
        assert kernel_for(CUDA, BF16, 128, softcap=30.0).name == "position"
    first, second = (r.getMessage() for r in caplog.records)
    assert "the position kernel for all blocks; not flash3: flash-attn 3 is called with one head_dim, not 192" in first
    assert "not cudnn: cuDNN attention through PyTorch is called without a softcap, not with 30.0" in second
    assert kernel_for(CUDA, BF16, 128, value_dim=128, softcap=0.0).name == "flash3+position"


@pytest.mark.parametrize(
    "capability,backend,head_dim,value_dim,softcap,message",
    [
        ((9, 0), "cudnn", 192, 128, 0.0, "one head_dim, not 192 for keys and 128 for values; give .*-backend auto"),
        ((9, 0), "aten", 64, None, 30.0, "called without a softcap, not with 30.0; give .*-backend auto"),
        ((9, 0), "triton", 64, 40, 0.0, "supports head_dim 64, 80.*, not 40; give values of head_dim 64"),
        ((9, 0), "auto", 192, 300, 0.0, "supports head_dim 64, 80.*, not 300; give values of head_dim 256"),
        ((8, 6), "auto", 64, None, 5.0, "does not run on sm_86; give softcap 0"),
        ((8, 6), "auto", 64, 128, 0.0, "does not run on sm_86; give values of head_dim 64"),
    ],
)
def test_what_no_library_has_is_refused_by_name(capability, backend, head_dim, value_dim, softcap, message, gpu):
    gpu(capability)
    with pytest.raises(UsageError, match=f"--cp-attention-backend {backend}: .*{message}"):
        kernel_for(CUDA, BF16, head_dim, backend, value_dim=value_dim, softcap=softcap)


WINDOW = [KeyRanges(*(torch.tensor([x], dtype=torch.int32) for x in ([0] * 40 + [*range(24)], [*range(1, 65)]))), 64]
CHANGES = {  # advice: what it changes
    r"give --cp-attention-backend (\w+)": lambda case, name: case | {"backend": name},
    r"give --kv-channels (\d+)": lambda case, d: case | {"head_dim": int(d), "value_dim": case["value_dim"] and int(d)},
    r"give values of head_dim (\d+)": lambda case, d: case | {"value_dim": int(d)},
    r"leave out (windows and packed documents|--window-size 9)": lambda case, _: case | {"irregular": None},
    r"give softcap (0)": lambda case, _: case | {"softcap": 0.0},
    r"give --(bf16)": lambda case, _: case | {"dtype": BF16},
    r"turn torch.use_deterministic_algorithms (off)": lambda case, _: case | {"deterministic": False},
}


def refusal(case: dict, before_the_run: bool) -> str:
    """The error before a run or in it, or nothing."""
    torch.use_deterministic_algorithms(bool(case["deterministic"]), warn_only=case["deterministic"] == "warn")
    backend, dtype, head_dim, irregular, _, value_dim, softcap = case.values()
    how = {"value_dim": value_dim, "softcap": softcap}
    try:
        if before_the_run:
            check_backend(backend, dtype, head_dim, device="cuda", irregular=irregular and "--window-size 9", **how)
        kernel = kernel_for(CUDA, dtype, head_dim, backend, **how)
        if irregular:
            kernel.pieces(*WINDOW)
        return ""
    except UsageError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)


def follow(why: str, case: dict) -> dict:
    """The case after the advice of an error."""
    changed = case
    for text, change in CHANGES.items():
        for value in re.findall(text, why.rpartition("; ")[2]):
            changed = change(changed, value)
    assert changed != case, why
    return changed


@pytest.mark.parametrize("seed", range(3))
def test_what_is_advised_works(seed, gpu):
    draw, refused = random.Random(seed), 0
    for _ in range(300):
        capability = draw.choice([(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)])
        gpu(capability, *draw.sample(["flash2", "flash3", "flash4"], draw.randrange(4)), triton=draw.random() < 0.8)
        case = {
            "backend": draw.choice(BACKENDS),
            "dtype": draw.choice([BF16, torch.float16, F32]),
            "head_dim": draw.choice([8, 40, 64, 72, 100, 112, 128, 192, 256, 320]),
            "irregular": draw.choice([None, True]),
            "deterministic": draw.choice([False, False, True, "warn"]),
            "value_dim": draw.choice([None, None, None, 64, 72, 300]),
            "softcap": draw.choice([0.0, 0.0, 30.0]),
        }
        if draw.random() < 0.3:
            case |= {"value_dim": case["head_dim"]}
        before_the_run = draw.random() < 0.5
        if not (why := refusal(case, before_the_run)):
            continue
        refused += 1
        if capability < (8, 0):
            assert why.endswith("no backend runs on this GPU; use one of compute capability 8.0 or newer")
            continue
        changed = follow(why, case)
        if "computes full and causal blocks" in (then := refusal(changed, before_the_run)):
            assert not before_the_run and "irregular" not in why  # its masks were not known before
            changed, then = follow(then, changed), refusal(follow(then, changed), before_the_run)
        assert not then, (why, case)
    assert refused > 100


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_without_fences_is_not_used_where_the_kernel_cannot_set_them(gpu):
    for version in ("3.6.0", "3.7.0"):
        gpu((10, 0), of_triton=version)
        advice = f"Triton {version} may compute wrong products on sm_100; install torch 2.12.1 or newer; give .*aten"
        with pytest.raises(UsageError, match=advice):
            check_backend("triton", BF16, 128, device="cuda")
        assert kernel_for(CUDA, BF16, 128).name == "aten"
        gpu((9, 0), of_triton=version)
        check_backend("triton", BF16, 128, device="cuda")
    gpu((10, 0), of_triton="3.7.1")
    check_backend("triton", BF16, 128, device="cuda")


def test_without_triton_only_plain_masks(gpu):
    gpu((9, 0), triton=False)
    assert kernel_for(CUDA, BF16, 128).name == "aten"  # cuDNN does not take every full and causal block
    message = r"auto: triton is not installed \(pip install triton\); leave out --window-size 512"
    with pytest.raises(UsageError, match=message):
        check_backend("auto", BF16, 128, device="cuda", irregular="--window-size 512")


def test_for_another_host_only_what_holds_everywhere_counts():
    check_backend("flash3", BF16, 128, device="cuda", on_this_host=False)
    check_backend("triton", F32, 128, device="cuda", on_this_host=False, irregular="--window-size 512")
    for backend, dtype, dim, irregular in [
        ("flash3", F32, 128, None),
        ("cudnn", BF16, 512, None),
        ("cudnn", BF16, 64, "--reset-attention-mask"),
    ]:
        with pytest.raises(UsageError, match=f"--cp-attention-backend {backend}: "):
            check_backend(backend, dtype, dim, device="cuda", irregular=irregular, on_this_host=False)


def test_on_a_cpu(monkeypatch):
    cpu = torch.device("cpu")
    assert type(kernel_for(cpu, F32, 20)) is type(kernel_for(cpu, F32, 20, "aten"))
    check_backend("auto", F32, 20, device="cpu", irregular="--window-size 4")
    for backend in ("cudnn", "flash2", "flash4", "triton"):
        with pytest.raises(UsageError, match=f"{backend}: this host has no GPU; give --cp-attention-backend aten"):
            kernel_for(cpu, F32, 64, backend)
    for backend in ("auto", "aten"):
        assert kernel_for(cpu, F32, 20, backend, softcap=5.0).name == "softcap"
        assert kernel_for(cpu, F32, 20, backend, value_dim=8).name == "aten"
    with pytest.raises(UsageError, match="cudnn: this host has no GPU; give --cp-attention-backend aten"):
        kernel_for(cpu, F32, 64, "cudnn", softcap=5.0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_backend("triton", F32, 64, device="cpu")


@pytest.fixture
def installed(monkeypatch):
    """`installed(library, version, module)`: a package of this version, None for none, and what is imported."""

    def pretend(name, version, module=None):
        def version_of(package):
            if version is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(importlib.metadata, "version", version_of)
        monkeypatch.setitem(sys.modules, LIBRARIES[name].module, module or SimpleNamespace())
        return LIBRARIES[name].missing(128)

    return pretend


@pytest.mark.parametrize("version,reason", [("2.6.3", "flash-attn 2.6.3 is older than 2.7"), ("2.10.0.post1", None)])
def test_old_versions_of_a_library(version, reason, installed):
    assert installed("flash2", version) == reason


def test_the_copy_of_flash_attn_4_in_flash_attn_2_is_not_taken_for_it(installed):
    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0):
        raise AssertionError("as in flash-attn 2.8.3")

    assert installed("flash4", None, flash4()) == "flash-attn-4 is not installed"
    assert installed("flash4", "4.0.0b9", flash4()) == "flash-attn-4 4.0.0b9 is older than 4.0.0b36"
    copy = SimpleNamespace(_flash_attn_bwd=_flash_attn_bwd)
    assert (
        installed("flash4", "4.0.0b36", copy) == "flash_attn.cute comes from flash-attn 2.8; install flash-attn-4 again"
    )
    for version in ("4.0.0b36", "4.0.0"):
        assert installed("flash4", version, flash4()) is None


@pytest.mark.parametrize("version,said", [(None, "no cuDNN"), (91002, "9.10.2 has bugs"), (91500, "9.15.0 has bugs")])
def test_versions_of_cudnn_with_faults_are_refused(version, said, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert said in LIBRARIES["cudnn"].missing(64)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    assert LIBRARIES["cudnn"].missing(64) is None


def test_pytorch_is_asked_for_cudnn_with_large_heads(monkeypatch):
    cudnn, asked = sys.modules[LIBRARIES["cudnn"].__module__], []
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92300)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **how: real(*shape, **how))

    def can_use(params):
        asked.append((params.query.shape[-1], params.value.shape[-1], params.query.requires_grad, params.dropout))
        return len(asked) > 1

    monkeypatch.setattr(cudnn, "can_use_cudnn_attention", can_use)
    assert "head_dim 256 needs cuDNN newer than 9.22" in LIBRARIES["cudnn"].missing(256)
    assert LIBRARIES["cudnn"].missing(256) is None and LIBRARIES["cudnn"].missing(128) is None
    assert asked == [(256, 256, True, 0.0)] * 2  # gradients too; not for 128


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "capability,installed,head_dim,expected",
    [
        ((9, 0), (), 128, "aten+position"),
        ((9, 0), ("flash3",), 192, "flash3+position"),
        ((9, 0), ("flash3", "flash4"), 256, "flash4+position"),
        ((10, 0), ("flash4",), 256, "flash4+position"),
    ],
)
def test_auto_is_deterministic_where_pytorch_must_be(capability, installed, head_dim, expected, gpu, deterministic):
    gpu(capability, *installed)
    kernel = kernel_for(CUDA, BF16, head_dim)
    assert kernel.name == expected and kernel.plain.deterministic


def test_named_backends_without_deterministic_gradients_are_refused(gpu, deterministic):
    gpu((9, 0), "flash3")
    for name, dim in (("cudnn", 64), ("flash3", 256)):
        with pytest.raises(UsageError, match=f"{name}: .* no deterministic gradients for head_dim {dim} on sm_90"):
            kernel_for(CUDA, BF16, dim, name)


def test_the_deterministic_mode_of_each_call_counts(gpu):
    gpu((9, 0))
    assert kernel_for(CUDA, BF16, 128).name == "cudnn+position"
    try:
        torch.use_deterministic_algorithms(True)
        assert kernel_for(CUDA, BF16, 128).name == "aten+position"
        torch.use_deterministic_algorithms(True, warn_only=True)  # in which ATen only warns
        assert kernel_for(CUDA, BF16, 128).name == "position"
        with pytest.raises(UsageError, match="aten: PyTorch's flash attention is not deterministic"):
            kernel_for(CUDA, BF16, 128, "aten")
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel_for(CUDA, BF16, 128).name == "cudnn+position"


@pytest.mark.parametrize(
    "name,backward", [("flash2", "_flash_attn_backward"), ("flash3", "bwd"), ("flash4", "_flash_attn_bwd")]
)
def test_deterministic_gradients_are_asked_for(name, backward, monkeypatch):
    q, k, v, dout = block(4, 4, 1, 1, 8)
    lse, asked = torch.zeros(4, 1, 1), []
    for wanted in (False, True):
        monkeypatch.setitem(sys.modules, LIBRARIES[name].module, SimpleNamespace())
        library = LIBRARIES[name](deterministic=wanted)
        library.calls = FAKES[name]()
        real = getattr(library.calls, backward)

        def record(*args, deterministic, real=real, **how):
            asked.append(deterministic)
            return real(*args, deterministic=deterministic, **how)

        setattr(library.calls, backward, record)
        library.backward(BlockGrad(dout, q, k, v, lse, lse, FULL), Scores(1.0))
    assert asked == [False, True]


# -------------------------------------------------------------------------------------------------- the pieces


def key_ranges(first, end):
    return KeyRanges(*(torch.tensor([x], dtype=torch.int32) for x in (first, end)))


def test_few_plain_pieces_go_to_the_library_and_the_others_in_one_launch():
    library = LIBRARIES["aten"]()
    kernel = LibraryAndPosition(library, Position())
    n = 64
    zero, up = [0] * n, list(range(1, n + 1))
    plain = {
        "full": (key_ranges(zero, [n] * n), n),
        "causal": (key_ranges(zero, up), n),
        "diagonal": (key_ranges(zero, [i + n for i in up]), 2 * n),
    }
    for block, keys in plain.values():
        pieces = kernel.pieces(block, keys)
        assert pieces == library.pieces(block, keys) and 1 <= len(pieces) <= 2
    steps = key_ranges(zero, [4 * i for i in up]), 4 * n  # four diagonals
    window = key_ranges([max(0, i - 9) for i in up], up), n
    tiny = key_ranges(zero[:4], up[:4]), 4
    decoding = key_ranges(zero[:15], [n] * 15), n
    for block, keys in (steps, window, tiny, decoding):
        assert kernel.pieces(block, keys) == ["one launch"]
    assert kernel.pieces(key_ranges(zero[:16], [n] * 16), n) == [Piece(slice(0, 16), slice(0, n), FULL)]
    with pytest.raises(UsageError, match="aten: PyTorch's flash attention computes full and causal blocks, not"):
        library.pieces(*window)
    assert kernel.forward(None, None, None, window[0], Scores(1.0)) == "position"


@pytest.mark.parametrize(
    "name,rows,keys,expected",
    [
        ("cudnn", 1, 1280, "position"),  # a decoding step: else cuDNN would build a graph for each length of the cache
        ("aten", 1, 1280, "position"),
        ("aten", 15, 1280, "position"),
        ("cudnn", 16, 16, "position"),
        ("cudnn", 128, 300, "position"),
        ("cudnn", 128, 1280, "library"),
        ("aten", 16, 300, "library"),
    ],
)
def test_blocks_that_were_not_cut_go_to_a_kernel_that_takes_them(name, rows, keys, expected, monkeypatch):
    library = LIBRARIES[name]()
    for way in ("forward", "backward"):
        monkeypatch.setattr(library, way, lambda *_: "library")
        monkeypatch.setattr(Position, way, lambda *_: "position", raising=False)
    kernel = LibraryAndPosition(library, Position())
    q, k, v, dout = block(rows, keys, 1, 1, 8)
    assert kernel.forward(q, k, v, FULL, Scores(1.0)) == expected
    assert kernel.backward(BlockGrad(dout, q, k, v, None, None, FULL), Scores(1.0)) == expected


def test_cudnn_gets_whole_and_half_chunks_of_multiples_of_128():
    """Documents would give it a new shape, and so a new graph, in every batch. Other lengths trigger its bugs."""
    library = LIBRARIES["cudnn"]()
    kernel = LibraryAndPosition(library, Position())
    n = 512
    up, zero = list(range(1, n + 1)), [0] * n
    half = [0] * 256 + [256] * 256
    taken = {
        "causal": (key_ranges(zero, up), n, 1),
        "diagonal": (key_ranges(zero, [i + n for i in up]), 2 * n, 2),
        "zigzag before": (key_ranges(zero, [256] * n), n, 1),
        "zigzag own": (key_ranges(zero, [*up[:256], *(i + 512 for i in up[256:])]), 2 * n, 3),
        "documents of a half": (key_ranges(half, up), n, 2),
    }
    for name, (block, keys, count) in taken.items():
        pieces = kernel.pieces(block, keys)
        assert len(pieces) == count and pieces == library.pieces(block, keys), name
    quarters = [i // 128 * 128 for i in range(n)]
    others = {
        "documents of a quarter": (key_ranges(quarters[:256] + half[256:], up), n),
        "a document of 300": (key_ranges([0] * 300 + [300] * 212, up), n),
        "the diagonal left out": (key_ranges(zero, range(n)), n),  # cyclic
        "halves of 96": (key_ranges(zero[:192], [96] * 192), 192),
        "96": (key_ranges(zero[:96], up[:96]), 96),
        "keys of 64 modulo 128": (key_ranges(zero, [704] * n), 704),
    }
    for name, (block, keys) in others.items():
        assert kernel.pieces(block, keys) == ["one launch"], name
        with pytest.raises(UsageError, match=r"cudnn: .* in multiples of 128 rows, not \d+ rows by \d+ keys"):
            library.pieces(block, keys)


# --------------------------------------------------------------------------------------------------- the image


def test_the_image_has_what_the_project_pins_and_asks_for():
    root = Path(__file__).parents[2]
    text = (root / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=\"?([^\"\n]*)", text, re.MULTILINE))
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (root / "requirements.txt").read_text(), re.MULTILINE))
    assert arguments["BASE"].startswith(f"pytorch/pytorch:{pins['torch']}-cuda")
    assert "pip install -r requirements.txt" in text  # megatron-core and all else in the tested versions
    assert TorchVersion(arguments["FLASH_ATTN"]) >= LIBRARIES["flash2"].oldest
    architectures = [f"{architecture // 10}.{architecture % 10}" for architecture in TILES]
    assert arguments["TORCH_CUDA_ARCH_LIST"].split(";") == architectures
    for variable in ("FLASH_ATTN_CUDA_ARCHS", "NVTE_CUDA_ARCHS"):
        assert arguments[variable].split(";") == [str(architecture) for architecture in TILES]
    assert TorchVersion("2.9") <= TorchVersion(arguments["TRANSFORMER_ENGINE"]) < TorchVersion("2.12")
    assert "#subdirectory=hopper" in text and len(arguments["FLASH_ATTN_3"]) == 40  # auto's first choice on sm_90
