"""Emulated devices: strategies and peers take the time of the description, and too fast devices are refused."""

import contextlib
import importlib
import os
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from benchmarks import attention, device_table
from benchmarks.cases import Workload, parse_case
from benchmarks.device import PYTHON, DeviceKernel, EmulatedDevice, refusal, seen_pairs
from benchmarks.device_table import Result, Setting
from benchmarks.device_training import optimizer_takes_time, products_take_time
from benchmarks.peers import cpu_flash
from benchmarks.stopwatch import Stopwatch
from megatron.context_parallel import context_parallel_attention
from megatron.context_parallel.attention.context import AllRanks
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges
from megatron.context_parallel.plan.volume import Shape

H100 = load_cluster("dgx-h100").device


@contextlib.contextmanager
def no_time(seconds: float):
    yield


def resting(device=H100, head_dim: int = 16) -> EmulatedDevice:
    """A device that computes nothing and only counts its time."""
    emulated = EmulatedDevice(device, "fp32", head_dim, no_time)
    emulated.computes = False
    return emulated


@pytest.mark.parametrize("spec", ["ring", "ring:layout=contiguous", "mesh", "lightseq", "usp:head_parallel_size=2"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_strategy_takes_the_time_that_is_predicted(spec, kv_heads):
    """All blocks of all ranks, forward and backward, with launches; copies are free here."""
    n, length = 4, 1024
    device = replace(H100, memory_GB_s=1e9, block_us=1.0)
    emulated = resting(device)
    q, k, v = (torch.zeros(length, 1, heads, 16, requires_grad=True) for heads in (4, kv_heads, kv_heads))
    kernel = DeviceKernel(AtenFlash(), emulated)
    out = context_parallel_attention(q, k, v, AllRanks(n, spec), kernel=kernel)
    torch.autograd.grad(out, (q, k, v), out)
    cluster = Cluster(
        name="", source="", nodes=1, devices_per_node=n, device=device, inside=load_cluster("dgx-h100").inside
    )
    busy = 0.0
    for backward in (False, True):
        plan = parse_case(spec).choice.plan(n, backward=backward, heads=4, kv_heads=kv_heads)
        found = simulate(plan, cluster, Shape(length // n, 4, kv_heads, 16, 4), dtype="fp32")
        groups = plan.all_ranks // found.symmetry.ranks
        busy += groups * sum(span.end - span.start for span in found.spans if not span.channel)
    assert emulated.seconds == pytest.approx(busy, rel=0.01)


def test_peers_get_the_same_rule():
    """The same block, for this project's kernel and in the order of dimensions of flash-attn: time, shapes, dtypes."""
    batch, queries, keys, heads, kv_heads = 2, 24, 24, 4, 2
    q, k = torch.randn(queries, batch * kv_heads, heads // kv_heads, 16), torch.randn(keys, batch * kv_heads, 16)
    theirs_q, theirs_k = torch.randn(batch, queries, heads, 16), torch.randn(batch, keys, kv_heads, 16)
    lse = torch.zeros(q.shape[:-1])
    for mask in (FULL, CAUSAL):
        ours, peers = resting(), resting()
        kernel, flash = DeviceKernel(AtenFlash(), ours), cpu_flash.CpuFlash(Stopwatch(), peers)
        out, sums = kernel.forward(q, k, k, mask, Scores(0.25))
        grads = kernel.backward(BlockGrad(q, q, k, k, lse, lse, mask), Scores(0.25))
        assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, k.shape] and sums.shape == lse.shape
        causal = mask == CAUSAL
        out, sums = flash.forward(theirs_q, theirs_k, theirs_k, 0.25, causal)
        grads = flash.backward(theirs_q, theirs_q, theirs_k, theirs_k, out, sums, 0.25, causal)
        shapes = [theirs_q.shape, theirs_q.shape, theirs_k.shape, theirs_k.shape]
        assert [x.shape for x in (out, *grads)] == shapes and sums.shape == (batch, heads, queries)
        assert ours.seconds == peers.seconds > 2 * H100.block_us * 1e-6
    flash.device.computes = True
    exact = cpu_flash.forward(theirs_q, theirs_k, theirs_k, 0.25, True)
    assert all(
        torch.equal(a, b) for a, b in zip(flash.forward(theirs_q, theirs_k, theirs_k, 0.25, True), exact, strict=True)
    )


def test_libraries_that_import_flash_attn_take_the_time():
    with mock.patch.dict(sys.modules):
        cpu_flash.install(cpu_flash.CpuFlash(Stopwatch(), device := resting()))
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    q = torch.randn(1, 8, 2, 16)
    out, lse, *_ = interface._flash_attn_forward(q, q, q, 0.0, 0.3, True, -1, -1, 0.0, None, False)
    forward = device.seconds
    into = [torch.ones_like(q) for _ in range(3)]
    interface._flash_attn_backward(q, q, q, q, out, lse, *into, 0.0, 0.3, True, -1, -1, 0.0, None, False)
    assert not any(x.any() for x in (out, *into)) and 0 < forward < device.seconds


@pytest.mark.parametrize("documents, pieces", [(2, 2), (8, 1)])
def test_a_block_of_many_documents_is_one_launch(documents, pieces):
    """As on a GPU. The pieces have all the pairs of the block."""
    kernel, rows, length = DeviceKernel(AtenFlash(), resting()), torch.arange(512).unsqueeze(0), 512 // documents
    found = kernel.pieces(KeyRanges(rows // length * length, rows + 1), 512)
    pairs = [seen_pairs(p.q.stop - p.q.start, p.kv.stop - p.kv.start, p.mask) for p in found]
    assert len(found) == pieces
    assert sum(pairs) == pytest.approx(documents * length**2 / 2, rel=0.02)


def test_irregular_pieces_take_the_time_of_the_pairs_they_see():
    device = resting(replace(H100, block_us=0.0))
    with device.call(2, 3, 8, KeyRanges(torch.tensor([[0, 1, 2]]), torch.tensor([[2, 4, 7]])), backward=False):
        pass
    pairs = 2 + 3 + 5
    assert device.seconds == pytest.approx(4 * 16 * 2 * pairs / (H100.attention[0].forward_TFLOP_s * 1e12))


def test_linear_layers_take_the_time():
    device = resting()
    times = mock.Mock(product=lambda k, n: k * 1000 + n)
    x, weight = torch.randn(5, 2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    rest = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
    name = "linear_with_grad_accumulation_and_async_allreduce"
    with mock.patch.object(layers, name, lambda input, weight, bias, **rest: input @ weight.t()):
        products_take_time(device, times)
        product = getattr(layers, name)
        out = product(x, weight, None, **rest)
        grads = torch.autograd.grad(out.sum(), (x, weight))
        assert out.shape == (5, 2, 4) and [g.shape for g in grads] == [x.shape, weight.shape]
        assert not any(y.any() for y in (out, *grads)) and device.seconds == 3 * 3004
        device.computes = True
        assert torch.equal(product(x, weight, None, **rest), x @ weight.t())


def test_the_optimizer_takes_the_time_of_its_share():
    device = resting()
    times = mock.Mock(optimizer=lambda parameters: parameters * 10, run=mock.Mock(shards={"optim": 4}.get))
    state = mock.Mock(model=[torch.nn.Linear(3, 4), torch.nn.Linear(2, 8)])
    state.optimizer.step = lambda: (False, 2.5, None)
    optimizer_takes_time(state, device, times)
    assert state.optimizer.step() == (True, 0.0, None) and device.seconds == (4 * 4 + 3 * 8) // 4 * 10
    device.computes = True
    assert state.optimizer.step() == (False, 2.5, None)


def test_too_fast_devices_are_refused():
    assert refusal(python=0.030, work=1.0) is None and refusal(python=PYTHON * 2, work=2.0) is None
    told = refusal(python=0.060, work=1.0)
    assert "60.0 ms, 6.0% of the 1000 ms" in told and "at most 3%" in told and "2.0 times as slow" in told


def test_the_description_gets_the_time_of_a_step_and_of_a_swap():
    problem = Workload(4, 64, 1, 4, 4, 16, "fp32", True)
    cases = [parse_case(text) for text in ("ring", "allgather", "ulysses", "peer:torch")]
    steps = [sum(len(plan.steps[0]) for plan in case.plans(problem)) for case in cases[:3]]
    seconds = [steps[0] * 2e-3, steps[1] * 4e-3, steps[2] * 3e-3 + 4 * 1e-3, 9.0]  # a swap before and after each pass
    entries = [{"python": {"seconds": of_case}} for of_case in seconds]
    cluster = attention.with_python(load_cluster("dgx-h100"), cases, problem, entries)
    turns = max(1.0, 4 / len(os.sched_getaffinity(0)))  # all ranks swap at once
    assert cluster.device == replace(H100, step_us=3000.0, swap_us=1000.0 * turns)


# ------------------------------------------------------------------------------------------------- the table


def test_tables_are_written_between_the_marks(tmp_path):
    def summary(*times: float) -> dict:
        return {"times": times, "median": times[0], "spread": 0.02}

    measured = {"ring": summary(2.0, 2.1), "mesh": summary(1.0, 1.1), "peer:yunchang": summary(4.0)}
    measured |= {"lightseq": summary(1.5), "lightseq:balance=no": summary(2.4)}
    result = Result(measured, {"peer:torch": "too slow"}, {"ring": 1.0, "mesh": 1.2})
    results = dict.fromkeys([Setting("16 x 1", "MHA", "bf16"), Setting("4 x 4", "GQA", "bf16")], result)
    page = tmp_path / "page.md"
    begin = f"before\n<!-- made by {device_table.SCRIPT} -->\n"
    page.write_text(f"{begin}old\n<!-- end -->\nafter\n")
    device_table.write_table(page, device_table.SCRIPT, device_table.tables(results).splitlines())
    text = page.read_text()
    assert text.startswith(begin) and text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text and "| `mesh` | 1.000, 2.00x |" in text and "| `ring` | 2.0%, -50.0% |" in text
    assert "| `peer:yunchang` | 4.000, 0.50x |" in text and "4x4-gqa-bf16: `peer:torch` was not timed" in text
    assert "median 35.0%, worst 50.0%" in text and "4x4-gqa-bf16: wrong order: ring was slower than mesh" in text
    assert "| 7.5 / 4.5 = 1.67 | 1.60 (16 x 1), 1.60 (4 x 4) |" in text
    slower = Result({"ring": summary(2.2)}, {}, {})
    assert device_table.differences(results, dict.fromkeys(results, slower))[0] == "-9.1% 16x1-mha-bf16 ring"


def test_every_run_of_the_table_can_be_made():
    """Its flags are read, and its strategies fit the ranks and heads."""
    for setting in (Setting("4 x 4", heads, "bf16") for heads in device_table.KV_HEADS):
        args = attention.parse_args(setting.flags(5, device_table.Path("runs")))
        cases, _ = attention.cases_of(args, attention.problem_of(args, 16))
        assert len(cases) == len(args.strategies) and args.devices == "benchmarks/h100.yaml"
