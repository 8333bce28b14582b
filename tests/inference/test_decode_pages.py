"""Decode steps over pages by the paged kernel, in Triton's interpreter: by definition, and against the other form."""

import importlib.util
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.inference import decode_attention, decode_pages
from megatron.context_parallel.inference.cache import KVCache
from megatron.context_parallel.inference.decode_pages import DecodePages, can_attend_to_pages
from megatron.context_parallel.inference.decode_ranges import DecodeRanges
from megatron.context_parallel.inference.decode_rows import DecodeRows
from megatron.context_parallel.inference.heads import Heads
from megatron.context_parallel.inference.pages import PageTables
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.kernels.paged import PagedKernel, Seen, refusal
from megatron.context_parallel.kernels.quantized import pack, unpack
from tests.support.dense import dense_attention
from tests.support.interpreter import interpreter
from tests.support.nothing_new import NothingNew
from tests.support.pretended_gpu import pretended_gpu
from tests.support.session_case import VOCABULARY, session, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted():
    with interpreter() as run:
        yield run


PAGES = 40
FIRST, END = [0, 0, 9, 0, 100], [0, 1, 37, 70, 150]  # of five rows


def _errors(group: int, d: int, dv: int, page: int, dtype: torch.dtype, form: str | None, processors: int) -> Tensor:
    """The errors of the outputs and of the log-sum-exp of rows that see from no key to many, in pages in any order."""
    torch.manual_seed(0)
    rows, kv_heads = len(END), 2
    k, v = (torch.randn(PAGES * page, kv_heads, size).to(dtype) for size in (d, dv))
    q = torch.randn(rows, kv_heads * group, d).to(dtype)
    table = torch.stack([torch.randperm(PAGES) for _ in range(rows)]).int()
    stored = [pack(x, form) if form else x for x in (k, v)]
    if form:
        k, v = (unpack(x, form, dtype) for x in stored)
    seen = Seen(table, torch.tensor(FIRST).int(), torch.tensor(END).int(), page)
    kernel = PagedKernel(
        rows, kv_heads * group, kv_heads, dv, likely=2, device=torch.device("cpu"), processors=processors
    )
    found = torch.full((rows, kv_heads * group, dv + 1), 7.0)
    kernel.forward(q, *stored, seen, 0.1, found[..., :-1], found[..., -1], form)
    errors = []
    assert (found[0, ..., :-1] == 0).all() and found[0, ..., -1].isneginf().all()  # it sees no key
    for row, (first, end) in list(enumerate(zip(FIRST, END, strict=True)))[1:]:
        at = torch.arange(first, end)
        slots = table[row, at // page] * page + at % page
        of_row = q[row].double().unflatten(0, (1, kv_heads, group))
        keys, values = (x[slots].double().unsqueeze(2) for x in (k, v))
        out, lse = dense_attention(of_row, keys, values, torch.ones(1, 1, len(at), dtype=torch.bool), scale=0.1)
        wanted = torch.cat([out.flatten(1, 2)[0], lse.flatten(1, 2)[0].unsqueeze(-1)], -1)
        errors.append((found[row] - wanted).abs().max())
    return torch.stack(errors).max()


@pytest.mark.parametrize(
    ("group", "d", "dv", "page", "dtype", "form", "processors"),
    [
        (1, 64, 64, 4, torch.float32, None, 6),  # 3 parts
        (3, 80, 128, 7, torch.float32, None, 1),
        (20, 192, 128, 64, torch.float32, None, 4),
        (48, 64, 64, 16, torch.float16, None, 4),
        (2, 64, 64, 4, torch.float32, "int8", 8),
        (4, 80, 80, 16, torch.float16, "fp8", 8),
    ],
)
def test_rows_over_pages(interpreted, group, d, dv, page, dtype, form, processors):
    error = interpreted(_errors, group, d, dv, page, dtype, form, processors)
    assert error < (3e-6 if dtype is torch.float32 else 1e-3)


HEADS, SIZES = Heads(4, 2, 64, 64), (2, 64, 64)


def _tables() -> tuple[PageTables, dict[int, list[int]], dict[int, list[int]]]:
    """Page tables of three ranks with forks, freed and moved sequences; and the new tokens of a decode step."""
    tables = PageTables(3, 30, 4)
    for _ in range(4):
        tables.open()
    tables.add({1: 25, 2: 3, 3: 40, 4: 1})
    for _ in range(5):
        tables.add({1: 1, 3: 1})
    tables.free(2)
    tables.fork(3, 30)
    tables.fork(1, 9)
    new = {sequence: [1] for sequence in (1, 3, 4, 5, 6)}
    return tables, new, tables.add(dict.fromkeys(new, 1))


def _both_forms() -> list[float]:
    """The largest difference of partial outputs, and of merged ones, of each rank and window, from those of runs."""
    torch.manual_seed(1)
    tables, new, dealt = _tables()
    cpu, differences = torch.device("cpu"), []
    cores = [SimpleNamespace(layer_number=1, window=(w, 0), scale=0.1, backend="auto") for w in (-1, 7)]
    for rank in range(3):
        cache = KVCache(30, 4, [SIZES], torch.float32, cpu)
        rows = DecodeRows(tables, new, dealt, rank)
        for sequence in new:  # the other rows stay NaN
            slots = torch.as_tensor(tables.slots(sequence, rank))
            cache.append(0, slots, *torch.randn(2, len(slots), 2, 64))
        gathered = torch.randn(3, rows.size, HEADS.queries, HEADS.key_dim)
        parts = torch.randn(3, rows.size, HEADS.queries, HEADS.value_dim + 1)
        parts[1, 0, :, -1] = -torch.inf  # a rank without keys of a row
        sent = torch.zeros(2, *parts.shape)
        forms = [
            DecodePages(cache, HEADS, cores, gathered, sent[0], parts),
            DecodeRanges(cache, HEADS, gathered, [*sent[1]], parts),
        ]
        for of in forms:
            of.begin(rows)
        for core in cores:
            for of in forms:
                of.attend(core)
            for other, sequences in enumerate(rows.of_ranks):
                a, b = (x[other, : len(sequences)] for x in sent)
                assert torch.equal(a.isinf(), b.isinf()) and not a.isnan().any()
                differences.append(float((a - b).nan_to_num(0).abs().max()))
            for pages, runs in zip(*((of.merged(), of.merged_lse()) for of in forms), strict=True):
                differences.append(float((pages - runs).abs().max()))
    return differences


def test_pages_equal_runs(interpreted):
    differences = interpreted(_both_forms)
    assert len(differences) == 3 * 2 * 5 and max(differences) < 2e-6


def _decode(changes: dict) -> tuple[Session, Tensor]:
    """The logits of four steps of three sequences."""
    of = session(changes={"kv_channels": 64, **changes})
    sequences = [of.open() for _ in range(3)]
    of.forward({s: [s] * length for s, length in zip(sequences, (9, 1, 30), strict=True)})
    logits = [of.forward({s: [s + i] for s in sequences}) for i in range(4)]
    return of, torch.stack([rows[s] for rows in logits for s in sequences])


_attend = DecodePages.attend


def _sessions(store: str) -> list[float]:
    """How much the logits by pages differ from those by runs, over their norm."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        start()
        differences = []
        for changes in ({}, {"window_size": (6, 0), "softmax_type": "off-by-one"}):
            _, expected = _decode(changes)
            with (
                mock.patch.object(decode_attention, "can_attend_to_pages", return_value=True),
                mock.patch.object(decode_pages.DecodePages, "attend", autospec=True, side_effect=_attend) as attend,
            ):
                of, found = _decode(changes)
            assert attend.call_count == 2 * 4 and found.shape == (12, VOCABULARY)
            differences.append(float((found - expected).norm() / expected.norm()))
            (step,) = of._steps.values()
            launches = mock.patch.object(PagedKernel, "forward"), mock.patch.object(decode_pages, "merge_rows")
            with launches[0], launches[1], torch.no_grad(), NothingNew():
                step.run()  # a CUDA graph can capture it
        return differences
    finally:
        dist.destroy_process_group()


def test_logits_of_decode_steps(interpreted, tmp_path):
    assert max(interpreted(_sessions, str(tmp_path / "store"))) < 1e-5


def test_where_pages_are_attended_to():
    cache, cores = SimpleNamespace(form=None), [SimpleNamespace(backend="auto")]
    sizes = torch.bfloat16, torch.device("cuda")
    with pretended_gpu():
        assert can_attend_to_pages(cache, HEADS, cores, *sizes)
        assert not can_attend_to_pages(cache, HEADS, [*cores, SimpleNamespace(backend="flash3")], *sizes)
        assert "float64" in refusal(torch.device("cuda"), torch.float64, 64, 64, None)
        assert "not 72" in refusal(torch.device("cuda"), torch.float16, 64, 72, None)
        assert not refusal(torch.device("cuda"), torch.float16, 64, 64, "fp8")
    with pretended_gpu((8, 0)):
        assert "sm_80" in refusal(torch.device("cuda"), torch.float16, 64, 64, "fp8")
        assert not refusal(torch.device("cuda"), torch.float16, 64, 64, "int8")
    with pretended_gpu((7, 5)):
        assert "sm_75" in refusal(torch.device("cuda"), torch.float16, 64, 64, None)
    assert not can_attend_to_pages(cache, HEADS, cores, torch.float32, torch.device("cpu"))
