"""Keys and values in 8 bits: errors, bytes in the cache and between ranks, and the same results on all ranks."""

from unittest import mock

import pytest
import torch

from megatron.context_parallel import UsageError
from megatron.context_parallel.commands import run_text_generation_server
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.interface import Scores
from megatron.context_parallel.kernels.masks import FULL
from megatron.context_parallel.kernels.quantized import QuantizedKernel, pack, unpack
from megatron.context_parallel.plan.ir import T
from megatron.context_parallel.runtime.executor import Executor
from tests.support.session_case import session, start

HEADS, DIM, LAYERS = 2, 8, 2  # key/value heads, head_dim


def test_rows_are_rounded_to_their_scales():
    x = torch.randn(50, 3, 16) * torch.logspace(-6, 6, 50).view(-1, 1, 1)
    x[7, 1] = 0
    largest = x.abs().amax(-1, keepdim=True)
    for form, bound in (("int8", largest / 127 / 2), ("fp8", x.abs() / 16 + largest / 448 / 512)):
        packed = pack(x, form)
        assert packed.dtype == torch.uint8 and packed.shape == (50, 3, 16 + 4)
        found = unpack(packed, form, torch.float32)
        assert ((found - x).abs() <= bound * 1.001).all() and not found[7, 1].any()
        assert torch.equal(unpack(pack(found, form), form, torch.float32), found) or form == "fp8"
    x[3, 0, 5] = float("nan")
    broken = unpack(pack(x, "int8"), "int8", torch.bfloat16).isnan()
    assert broken[3, 0].all() and broken.sum() == 16  # a text with a NaN ends, also with a cache in 8 bits


def test_a_kernel_reads_packed_rows_where_they_lie():
    kernel, scores = QuantizedKernel(AtenFlash(), "int8", 16, 16), Scores(0.25)
    q, k, v = torch.randn(1, 3, 2, 16), torch.randn(40, 3, 16), torch.randn(40, 3, 16)
    stored = [pack(x, "int8") for x in (k, v)]
    found = kernel.forward(q, *(x[5:30] for x in stored), FULL, scores)
    plain = AtenFlash().forward(q, *(unpack(x, "int8", torch.float32)[5:30] for x in stored), FULL, scores)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    with pytest.raises(UsageError, match="--kv-cache-dtype int8: head_dim 18 is no multiple of 4; give auto"):
        QuantizedKernel(AtenFlash(), "int8", 18, 16)


def logits(form: str, variants: tuple[str, ...]) -> tuple[list, list, int]:
    """The logits of two passes and a decode step by each variant, the bytes of keys that arrive, and of the cache."""
    start()
    found, arrived = [], []
    make = Executor._buffer

    def buffer(self, tensor, rows):
        value = make(self, tensor, rows)
        arrived[-1] += sum(x.nbytes for x in value) * (tensor is T.KV)
        return value

    for variant in variants:
        of = session(prefill=variant, kv_cache_dtype=form, cache_tokens=256)
        first, second = of.open(), of.open()
        passes = [{first: [*range(20)], second: [3, 4]}, {first: [5, 6, 7], second: [*range(11)]}]
        for new in [*passes, {first: [8], second: [9]}]:
            arrived.append(0)
            with mock.patch.object(Executor, "_buffer", buffer):
                rows = of.forward(new)
            whole = of.share({s: row.tolist() for s, row in rows.items()}, width=of.vocabulary)
            found.append([whole[s] for s in sorted(whole)])
    return found, arrived, sum(x.nbytes for layer in of.cache._rows for x in layer)


def test_bytes_and_results_on_two_ranks(ranks):
    """Each row is rounded alone, so logits do not depend on the number of ranks or on what is sent."""
    ((alone, _, stored),) = ranks(1, logits, "int8", ("pass-kv",))
    ((exact, _, plain),) = ranks(1, logits, "auto", ("pass-kv",))
    row = LAYERS * 2 * HEADS * (DIM + 4)
    assert stored == 257 * row and plain == 257 * LAYERS * 2 * HEADS * DIM * 4  # a row is for padding
    alone, exact = (torch.tensor(x) for x in (alone, exact))
    assert 1e-4 < (alone - exact).norm() / exact.norm() < 0.05
    for found, arrived, stored in ranks(2, logits, "int8", ("pass-kv", "pass-q")):
        for part in torch.tensor(found).split(len(alone)):
            assert (part - alone).norm() < 1e-5 * alone.norm()
        assert stored == 129 * row
        assert arrived == [11 * row, 18 * row, 0, 0, 0, 0]  # half of 22 and of 36 tokens; queries alone with pass-Q


def test_decoders_of_other_programs_are_refused():
    flags = ["--load", "x", "--handoff-host", "127.0.0.1", "--kv-cache-dtype", "int8"]
    with pytest.raises(UsageError, match=r"--kv-cache-dtype int8: decoders take .* leave out --handoff-host"):
        run_text_generation_server.main(flags)
