"""The GPU check as it runs on a host with one GPU, with a GPU that is pretended."""

import json
import pickle
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel.commands import gpu_check
from megatron.context_parallel.commands.gpu_checks import common, compile, decode, errors, speed, stages, step, training
from megatron.context_parallel.commands.gpu_checks.bars import STAGES
from megatron.context_parallel.kernels.position.tiles import TILES, Tiles
from megatron.context_parallel.runtime.comm import transport
from tests.support.as_nccl import as_nccl
from tests.support.gpu_kernels import KERNELS, LIBRARIES
from tests.support.pretended_gpu import GPU, pretended_gpu

real_init, real_sets = dist.init_process_group, compile.sets

SMALL = common.CheckSizes(
    block_rows=32,
    head_dims=(64,),
    ranks=(2,),
    rows_per_rank=(64,),
    value_dims=(192, 128),
    far_rows=256,
    lengths=(256,),
    speed_head_dims=(64,),
    heads=((2, 2),),
    decode_rows=2,
    decode_tokens=2048,
    repeats=1,
    overhead_rows_per_rank=32,
    overhead_heads=(4, 2),
    odd_rows=21,
    documents=5,
    document_tokens=160,
    document_ranks=2,
    memory_rows=(32,),
    training_rows=64,
    iterations=(2, 4),
    step=(64, 3),
    longest=(128, 2),
)
TINY_LLAMA = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 500"


class Inline:
    """As `ProcessPoolExecutor`: it runs jobs at once, if they could be sent to a process."""

    def __init__(self, workers, mp_context):
        assert workers > 1 and mp_context.get_start_method() == "spawn"  # a process with CUDA cannot be forked

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *args):
        function, args = pickle.loads(pickle.dumps((function, args)))
        done = Future()
        done.set_result(function(*args))
        return done


def init_process_group(backend, *, device_id, **how):
    """As PyTorch's, with gloo for NCCL, which this build may lack."""
    assert backend == "nccl" and device_id in (GPU, None)
    real_init("gloo", **how)
    dist.group.WORLD.bound_device_id = device_id


def to_itself(group, sends, receives):
    """As `torch_works.post`. gloo sends nothing to its own rank."""
    for (_, x), (_, y) in zip(sends, receives, strict=True):
        y.copy_(x)
    return []


@pytest.fixture
def host(monkeypatch):
    """A host with one GPU."""
    monkeypatch.setattr(common, "CheckSizes", lambda: SMALL)
    monkeypatch.setattr(compile, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(stages.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="580.159.04\n"))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(transport, "post", to_itself)
    monkeypatch.setattr(decode, "capture", lambda call: call)
    monkeypatch.setattr(stages, "check_decode_model", lambda *_: None)  # tests/commands/test_gpu_check.py runs it
    monkeypatch.setattr(errors, "STRATEGIES", ["ring", "attention2d"])
    monkeypatch.setattr(errors, "BOUNDS", {torch.bfloat16: errors.BOUNDS[torch.bfloat16]})
    monkeypatch.setattr(speed, "REPEATS", 2)
    monkeypatch.setattr(training, "RUNS", [run for run in training.RUNS if run.backend == "auto"])  # really on the CPU
    monkeypatch.setattr(step, "MODEL", TINY_LLAMA)  # it too
    monkeypatch.setattr(compile, "sets", lambda sizes: real_sets(sizes)[:2])
    with pretended_gpu() as gpu, as_nccl():
        yield gpu


TIMES = ("step / best", "executor: all but kernels", "documents, ms")  # targets about times, which differ on a CPU


def test_every_stage_is_right_and_runs_to_its_end(host, tmp_path):
    path = tmp_path / "check.jsonl"
    gpu_check.main(["--output", str(path)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    done = [line for line in lines if "stage" in line]
    assert [line["stage"] for line in done] == list(STAGES)
    bars = [bar for line in done for bar in line["bars"]]
    assert [bar for bar in bars if bar["verdict"] != "PASS" and not bar["bar"].startswith(TIMES)] == []
    assert {bar["reached"] for bar in bars if "waits of the host" in bar["bar"]} == {0}
    rows = [line for line in lines if line.get("table") == "blocks against float64"]
    assert {row["backend"] for row in rows} == {"aten", "cudnn", "triton"}
    few = {f"{mask}, {count} rows" for mask in ("full", "last keys") for count in (1, 3, 15)}
    others = {"causal, softcap", "causal, deterministic", "window, deterministic", "causal, values of 128"}
    assert few | others < {row["mask"] for row in rows if row["backend"] == "triton"}
    assert [row["call"] for row in lines if row.get("table") == "calls of one rank" and row["bound"]] == [
        "all_gather", "all_to_all", "reduce_scatter", "messages_to_itself", "connect"
    ]  # fmt: skip
    decoded = [row for row in lines if row.get("table") == "decode"]
    assert [row["format"] for row in decoded] == ["auto", "auto", "int8", "fp8"]
    swept = [line for line in lines if line.get("table") == "tiles"]
    assert {row["kernel"] for row in swept} == {"forward", "dq", "dkv"} and all(row["ms"] for row in swept)
    first = next(row for row in swept if row["kernel"] == "dkv")
    assert tuple(first[name] for name in Tiles._fields) == TILES[90]["dkv"][64]
    trained = [row for row in lines if row.get("table") == "training"]
    assert {(row["iterations"], row["verdict"]) for row in trained} == {(2, "PASS")}
    assert [(row["dtype"], row["sharding"]) for row in trained] == [
        ("float32", "none"),
        ("bfloat16", "none"),
        ("float32", "use-distributed-optimizer"),
        ("float32", "use-torch-fsdp2"),
    ]
    for table, tokens in (("step", 64), ("longest", 128)):
        rows = [row for row in lines if row.get("table") == table]
        assert [row["predicted from"] for row in rows] == ["dgx-h100"] * 3 + ["rates measured now"] * 3
        assert {row["tokens"] for row in rows} == {tokens} and all(row["ratio"] > 0 for row in rows)
    assert host.launches.keys() == KERNELS.keys() and host.operators.keys() == LIBRARIES.keys()


def test_an_error_ends_a_row_or_a_stage_and_no_more(host, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("cuDNN Frontend error: no valid engine\nand more")

    monkeypatch.setitem(LIBRARIES, "_scaled_dot_product_cudnn_attention", broken)
    monkeypatch.setattr(stages, "measure_memory", broken)
    path = tmp_path / "check.jsonl"
    assert gpu_check.main(["--output", str(path), "--stage", "blocks", "memory", "te"]) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [line for line in lines if line.get("table") == "blocks against float64"]
    assert {row["backend"] for row in rows if row["verdict"] == "FAIL"} == {"cudnn"}
    assert {row["wrong"] for row in rows if row["backend"] == "cudnn"} == {
        "RuntimeError: cuDNN Frontend error: no valid engine"
    }
    assert {row["verdict"] for row in rows if row["backend"] == "triton"} == {"PASS"}
    assert gpu_check.finished_stages(path) == ["blocks", "te"]  # the other one runs again
    assert "memory runs to its end" in capsys.readouterr().out


def test_a_process_whose_gpu_is_lost_ends_and_the_next_one_goes_on(host, tmp_path, monkeypatch, capsys):
    def lost(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stages, "measure_memory", lost)
    path = tmp_path / "check.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lost)
        assert gpu_check.main(["--output", str(path), "--stage", "memory", "te"]) == 1
    assert gpu_check.finished_stages(path) == ["memory"]
    assert "not run: te" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong,message",
    [
        (lambda x: x @ x, "CuBLAS"),
        (lambda x: x + torch.ones(4, 4), "same device"),
        (lambda x: x.numpy(), "numpy"),
    ],
)
def test_the_pretended_gpu_refuses_what_a_gpu_refuses(wrong, message, host):
    with common.deterministic_mode(), pytest.raises((RuntimeError, TypeError), match=message):
        wrong(torch.ones(4, 4, device=GPU))


def test_the_pretended_gpu_counts_waits(host):
    x = torch.ones(4, device=GPU)
    with common.synchronisations(GPU) as counted:
        x += torch.ones(4).pin_memory().to(GPU, non_blocking=True)
        assert counted() == 0
        assert x.tolist() == [2.0] * 4 and float(x.sum()) == 8
        x[torch.tensor([1])]
        x.to("cpu")
        assert counted() == 4
