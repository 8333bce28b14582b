"""All of tools/gpu_check.py without a GPU, at tiny sizes with CPU kernels. The times have no meaning."""

import json
import logging
import os
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import torch

from megatron.context_parallel import STRATEGIES, UsageError
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.fit import bytes_needed
from megatron.context_parallel.commands import gpu_check
from megatron.context_parallel.commands.gpu_checks import (
    common,
    compile,
    decode_model,
    errors,
    speed,
    step,
    step_run,
    te,
    training,
)
from megatron.context_parallel.commands.gpu_checks.bars import SECONDS, STAGES, judge
from megatron.context_parallel.commands.gpu_checks.stages import Host, run_stage
from megatron.context_parallel.integration.transformer_engine import DotProductAttention
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, Piece
from megatron.context_parallel.kernels.names import BACKENDS
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from megatron.context_parallel.plan.liveness import peak
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from tests.support import transformer_engine_standin

CPU = torch.device("cpu")
TINY = common.CheckSizes(
    block_rows=15,
    head_dims=(8,),
    ranks=(4,),
    rows_per_rank=(12,),
    value_dims=(8, 4),
    far_rows=40,
    lengths=(64,),
    speed_head_dims=(8,),
    decode_layers=1,
    decode_sequences=(1, 3),
    decode_prompt=5,
    repeats=1,
    overhead_rows_per_rank=8,
    overhead_heads=(4, 2),
    odd_rows=13,
    documents=5,
    document_tokens=160,
    document_ranks=2,
    memory_rows=(16,),
    te_rows=32,
)


class HostClock:
    mark = staticmethod(time.perf_counter)
    let_host_ahead = staticmethod(lambda: None)

    def between(self, start, end):
        return end - start


class NoMeter:
    """A peak of one byte."""

    start = staticmethod(lambda: None)
    peak = staticmethod(lambda: 1)


def memory_units() -> float:
    plans = [STRATEGIES["ring"].plan(8, backward=backward) for backward in (False, True)]
    return max(peak(plan, 0, 0.5) for plan in plans)


class OneLaunch(Reference):
    """Computes any block in one call, as the position kernel does."""

    def pieces(self, block, keys):
        return [Piece(slice(None), slice(None), block)]

    def forward(self, q, k, v, mask, scores):
        out, lse = super().forward(q, k, v, mask, scores)
        return out.to(q.dtype), lse.float()


class Wrong(OneLaunch):
    def backward(self, grad, scores):
        dq, dk, dv = super().backward(grad, scores)
        return dq, dk, dv * 1.1


# In place of the trainer: losses that fall, a little higher in 16 bits; 0.1 higher or an error, as asked.
TRAINER = """
import json, os, pathlib, sys
value = lambda flag, default: sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default
run, backend = pathlib.Path(value("--save", None)), value("--cp-attention-backend", "cpu")
if "--load" not in sys.argv:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
elif not (pathlib.Path(value("--load", None)) / "metrics.jsonl").exists():
    sys.exit("no checkpoint")
if backend == "BROKEN":
    sys.exit("Traceback\\nRuntimeError: out of memory")
run.mkdir()
first = int(value("--ckpt-step", 0)) + 1
losses = {i: 5 / i + 1e-3 * ("--bf16" in sys.argv) + 0.1 * (backend == "WRONG") for i in range(first, 21)}
with (run / "metrics.jsonl").open("w") as file:
    for iteration, loss in losses.items():
        print(json.dumps({"iteration": iteration, "lm_loss": loss}), file=file)
"""


@pytest.fixture
def trainer(monkeypatch):
    """`trainer(WRONG="triton")`: the backend whose losses are wrong; BROKEN: the one that ends with an error."""

    def use(**bad):
        program = TRAINER
        for name, backend in ({"WRONG": "none", "BROKEN": "none"} | bad).items():
            program = program.replace(name, backend)
        monkeypatch.setattr(training, "PROGRAM", program)

    return use


@pytest.mark.parametrize("bad", ["WRONG", "BROKEN"])
def test_training_compares_losses_with_those_of_a_cpu(trainer, bad):
    trainer(**{bad: "triton"})
    report = common.CheckReport()
    training.check_training(report, TINY, CPU)
    good = [row for row in report.numbers["training"] if row["backend"] == "auto"]
    wrong = [row for row in report.numbers["training"] if row["backend"] == "triton"]
    assert [row["dtype"] for row in good] == ["float32", "bfloat16", "float32", "float32"]
    assert [row["difference"] for row in good] == pytest.approx([0, 1e-3, 0, 0])
    assert {(row["iterations"], row["verdict"]) for row in good} == {(10, "PASS")}
    assert {row["sharding"] for row in good} == {"none", "use-distributed-optimizer", "use-torch-fsdp2"}
    assert [(row["backend"], row["verdict"]) for row in wrong] == [("triton", "FAIL")] * 2
    expected = [0.1, 0.101] if bad == "WRONG" else [None, None]
    assert [row["difference"] for row in wrong] == (pytest.approx(expected) if bad == "WRONG" else expected)
    assert {row["wrong"] for row in wrong} == {"" if bad == "WRONG" else "RuntimeError: out of memory"}


def test_decode_steps_of_a_model_fail_with_a_warning_or_other_logits(monkeypatch):
    real = decode_model._steps

    def steps(*given):
        found = real(*given)
        if len(report.numbers[decode_model.TABLE]) == 0:
            logging.getLogger("megatron.context_parallel.inference.step_graph").warning("without a CUDA graph")
        else:
            found[0][0] *= 3
        return found

    monkeypatch.setattr(decode_model, "_steps", steps)
    monkeypatch.setattr(decode_model, "CASES", decode_model.CASES[:2])
    report = common.CheckReport()
    decode_model.check_decode_model(report, TINY, CPU)
    warned, wrong = report.numbers[decode_model.TABLE]
    assert (warned["verdict"], warned["wrong"]) == ("FAIL", "without a CUDA graph") and warned["error"] < 1e-2
    assert (wrong["verdict"], wrong["wrong"]) == ("FAIL", "") and wrong["error"] > 0.1


@pytest.fixture
def kernels(monkeypatch):
    """`kernels(kernel)`: `kernel` is the backend triton."""
    real = common.kernel_for

    def use(triton):
        def kernel_for(device, dtype, dim, name="auto", **options):
            return triton if name == "triton" else real(device, dtype, dim, name, **options)

        for module in (common, compile):
            monkeypatch.setattr(module, "kernel_for", kernel_for)

    return use


STEP = """
import json, sys
path, tokens, *flags = sys.argv[1:]
with open(path, "w") as file:
    print(json.dumps({"tokens": int(tokens), "ratio": 0.9, "verdict": "PASS"}), file=file)
sys.exit("RuntimeError: no FP8" if int(tokens) > 2**15 else 0)
"""


def test_everything_runs_and_agrees_with_float64(kernels, trainer, monkeypatch, capsys):
    kernels(OneLaunch())
    trainer()
    monkeypatch.setattr(step, "PROGRAM", STEP)
    report, bars, host = common.CheckReport(), [], Host(CPU, 1, HostClock(), NoMeter())
    for stage in STAGES:
        bars += run_stage(stage, report, list(BACKENDS[1:]), TINY, host)
    verdicts = {bar["bar"]: (bar["reached"], bar["verdict"]) for bar in bars}
    assert verdicts["errors of blocks over their bound"] == verdicts["errors of NCCL over their bound"] == (0, "PASS")
    assert verdicts["errors of strategies over their bound"] == (0, "PASS")
    assert verdicts["calls of a kernel per gathered block of attention2d"] == (1.0, "PASS")
    assert all(reached is not None for reached, _ in verdicts.values())
    assert verdicts["results that differ in 5 repeats"] == (0, "PASS")
    assert verdicts["documents, waits of the host for the GPU"] == (0, "PASS")
    ((share, _),) = [verdicts[bar] for bar in verdicts if bar.startswith("peak")]
    (row, *_) = report.numbers["memory"]
    assert share == pytest.approx(max(1e-9 / r["formula_GB"] for r in report.numbers["memory"]))
    assert row["formula_GB"] * 1e9 == pytest.approx((memory_units() + 4) * 16 * 4 * 8 * 4)
    assert "left_out" in report.numbers["te"][0]
    decoded = report.numbers["decode steps of a model"]
    assert [(row["dtype"], row["cache"], row["verdict"]) for row in decoded] == [
        ("bfloat16", "auto", "PASS"), ("float32", "auto", "PASS"), ("bfloat16", "int8", "PASS")
    ]  # fmt: skip
    assert decoded[1]["error"] < 1e-5 and decoded[2]["error"] > 1e-3
    timed = report.numbers["time of decode steps"]
    assert [(row["sequences"], row["verdict"], row["eager, ms"] > 0) for row in timed] == [
        (1, "PASS", True),
        (3, "PASS", True),
    ]
    good, wrong = verdicts[next(bar for bar in verdicts if bar.startswith("training steps"))], report.numbers["longest"]
    assert good == (0, "PASS") and report.numbers["step"] == [{"tokens": 2**15, "ratio": 0.9, "verdict": "PASS"}]
    assert wrong == [
        {"tokens": 2**18, "ratio": 0.9, "verdict": "PASS"},  # what was measured before the error
        {"what": "the run", "wrong": "RuntimeError: no FP8", "verdict": "FAIL"},
    ]
    calls = [(row["call"], row["bound"], row["verdict"]) for row in report.numbers["calls of one rank"]]
    assert calls == [(call, False, "PASS") for call in ("all_gather", "all_to_all", "connect")]
    assert report.numbers["nccl"] == [
        {"left_out": "communication between GPUs: needs two or more GPUs, and this host has one"}
    ]
    blocks = report.numbers["blocks against float64"]
    common_masks = ["full", "full, whole tiles", "causal", "causal, odd rows", "causal, softcap"]
    common_masks += ["causal, deterministic", "causal, values of 4", "far queries"]
    irregular = ["step", "window", "documents", "2 samples", "blind rows", "window, deterministic", "far keys"]
    irregular += [f"{mask}, {rows} rows" for mask in ("full", "last keys") for rows in (1, 3, 15)]
    assert {(r["backend"], r["mask"]) for r in blocks} == {
        *(("aten", mask) for mask in common_masks),
        *(("triton", mask) for mask in common_masks + irregular),
    }
    strategies = report.numbers["strategies against float64"]
    assert {r["strategy"] for r in strategies} == set(STRATEGIES)
    assert {r["mask"] for r in strategies} == {"causal", "full", "window", "documents"}
    assert {(r["backend"], r["mask"]) for r in report.numbers["TFLOP/s, bfloat16"]} == {
        (name, mask) for name in ("aten", "triton") for mask in ("full", "causal", "step")
    }
    common.print_table("bars", bars)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["errors", "of", "blocks", "over", "their", "bound", "at", "most", "0", "0", "PASS"] in lines
    json.dumps(report.numbers)


class Layer(torch.nn.Module):
    """As a layer of Transformer Engine, with nothing but attention of one projection."""

    def __init__(self, hidden, ffn, heads, num_gqa_groups, params_dtype, device, **options):
        super().__init__()
        assert options["attention_dropout"] == 0 and options["self_attn_mask_type"] == "causal"
        self.sizes = heads, num_gqa_groups
        self.project = torch.nn.Linear(hidden, hidden + 2 * hidden // heads * num_gqa_groups, dtype=params_dtype)
        self.self_attention = torch.nn.Module()
        self.self_attention.core_attention = None

    def set_context_parallel_group(self, group, ranks, stream):
        self.self_attention.core_attention.set_context_parallel_group(group, ranks, stream)

    def forward(self, x):
        heads, groups = self.sizes
        qkv = self.project(x).unflatten(2, (heads + 2 * groups, -1))
        q, k, v = qkv.split([heads, groups, groups], 2)
        if ours := self.self_attention.core_attention:
            return ours(q, k, v, qkv_format="sbhd", attn_mask_type="causal")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("wrong", [False, True])
def test_inside_transformer_engine(wrong, monkeypatch):
    stand_in = types.ModuleType("transformer_engine.pytorch")
    stand_in.TransformerLayer = Layer
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", stand_in)
    monkeypatch.setattr(te, "why_not_importable", lambda: "")
    spec = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec"
    monkeypatch.setattr(spec, lambda: transformer_engine_standin._layer(False))
    support_cpu_host()
    if wrong:
        monkeypatch.setattr(DotProductAttention, "forward", lambda self, q, k, v, **_: q.flatten(2))
    report = common.CheckReport()
    te.check_te(report, TINY, CPU)
    verdicts = {row["checked"]: row["verdict"] for row in report.numbers["te"]}
    assert verdicts == {"TransformerLayer": "FAIL" if wrong else "PASS", "GPTModel": "PASS"}
    bars = run_stage("te", common.CheckReport(numbers=report.numbers), [], TINY, Host(CPU, 1, None, None))
    assert [bar["verdict"] for bar in bars] == ["FAIL" if wrong else "PASS"]


def test_wrong_gradients_fail(kernels):
    kernels(Wrong())
    report = common.CheckReport()
    errors.check_blocks(report, ["aten", "triton"], TINY, CPU)
    verdicts = {(r["backend"], r["verdict"]) for r in report.numbers["blocks against float64"]}
    assert verdicts == {("aten", "PASS"), ("triton", "FAIL")}


class Fails(OneLaunch):
    def forward(self, *given):
        raise RuntimeError("no valid engine\nand more")


def test_a_backend_that_fails_leaves_the_speed_of_the_others(kernels):
    kernels(Fails())
    report = common.CheckReport()
    bars = run_stage("speed", report, ["aten", "triton"], TINY, Host(CPU, 1, HostClock(), NoMeter()))
    found = {(row["backend"], row["wrong"], bool(row["forward"])) for row in report.numbers["TFLOP/s, bfloat16"]}
    assert found == {("aten", "", True), ("triton", "RuntimeError: no valid engine", False)}
    assert [(bar["reached"], bar["verdict"]) for bar in bars] == [(None, "FAIL")] * 2
    bars = run_stage("memory", report, [], TINY, Host(CPU, 1, HostClock(), None))  # without a meter
    assert len(report.numbers["memory"]) == 3 and [bar["verdict"] for bar in bars] == ["FAIL"]


def test_rows_of_a_table_may_lack_columns(capsys):
    report = common.CheckReport()
    report.add("t", case="a", left_out="needs a GPU")
    with common.row_of(report, "t", case="b") as row:
        row["ms"] = 31629.1
    with common.row_of(report, "t", case="c"):
        raise RuntimeError("lost\nand more")
    common.print_table("t", report.numbers["t"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["case", "left_out", "ms", "verdict", "wrong"] in lines
    assert ["b", "31629"] in lines and ["c", "FAIL", "RuntimeError:", "lost"] in lines


def test_infinities_in_other_places_are_errors():
    a, b = torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    assert errors.compare((a,), (b,)) == [0.0]
    assert errors.compare((torch.tensor([-torch.inf, 1.0]),), (b,)) == [torch.inf]
    assert errors.compare((torch.tensor([1.0, torch.nan]),), (b,)) == [torch.inf]


@pytest.mark.parametrize("mask", [FULL, CAUSAL, "step"])
def test_flops_count_visible_pairs(mask, kernels, monkeypatch):
    """A clock that ticks one second a call, so that TFLOP/s are the FLOPs counted."""
    kernels(OneLaunch())
    monkeypatch.setattr(HostClock, "between", lambda self, start, end: 1.0)
    report = common.CheckReport()
    speed.measure_speed(report, ["triton"], TINY, CPU, HostClock())
    (row, *_) = [r for r in report.numbers["TFLOP/s, bfloat16"] if r["mask"] == mask]
    rows, keys = (32, 128) if mask == "step" else (64, 64)
    growth = {FULL: 0, CAUSAL: 1, "step": 4}[mask]
    pairs = sum(growth * (i + 1) if growth else keys for i in range(rows))
    assert row["forward"] * 1e12 == pytest.approx(4 * pairs * 16 * 8)
    assert row["backward"] * 1e12 == pytest.approx(10 * pairs * 16 * 8)


class Ticks:
    """One more at each mark: a call takes 1, and so does what is between two calls."""

    now = 0

    def mark(self):
        self.now += 1
        return self.now

    def between(self, start, end):
        return end - start


def test_overhead_is_the_share_between_kernels(kernels):
    kernels(OneLaunch())
    report = common.CheckReport()
    speed.measure_overhead(report, ["triton"], TINY, CPU, Ticks())
    for row in report.numbers["executor"]:
        assert 0.5 < row["overhead"] < 0.55  # (calls + 1) / (2 calls + 1)


@pytest.mark.parametrize(
    "stage,reached,verdicts",
    [
        ("blocks", (0,), "PASS"),
        ("blocks", (1,), "FAIL"),
        ("speed", (0.7, 0.59), "PASS FAIL"),
        ("executor", (None, 0.03, 0, 1), "FAIL PASS PASS FAIL"),
    ],
)
def test_verdicts(stage, reached, verdicts):
    assert [bar["verdict"] for bar in judge(stage, *reached)] == verdicts.split()


@pytest.fixture
def h200(monkeypatch):
    """`h200(GiB)`: a GPU of so much memory, for predictions."""

    def use(memory=139.8):
        properties = types.SimpleNamespace(total_memory=memory * 2**30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return use


def run_of_step(tokens):
    flags = [*step.MODEL.split(), *step.FLAGS.split(), "--train-iters", "2"]
    return step_run.longest_that_fits(flags, tokens)


@pytest.mark.parametrize("memory,most,tokens", [(79.1, 2**15, 2**15), (79.1, 2**18, 2**17), (139.8, 2**18, 2**18)])
def test_a_long_training_step_fits_by_the_dry_run(memory, most, tokens, h200):
    h200(memory)
    assert run_of_step(most).seq_length == tokens


@pytest.mark.parametrize("share,verdict", [(1.009, "PASS"), (1.011, "FAIL")])
def test_a_training_step_is_measured_beside_its_prediction(share, verdict, h200, monkeypatch):
    h200()
    args = run_of_step(2**15)
    needed = bytes_needed(model_of(args), run_of(args))
    monkeypatch.setattr(step_run, "train", lambda args: (2.0, share * needed))
    monkeypatch.setattr(step_run, "probe", lambda **how: load_cluster("dgx-a100"))
    memory, *times = step_run.measured(args)
    assert memory["verdict"] == verdict and memory["ratio"] == pytest.approx(share)
    assert [row["measured"] for row in times] == pytest.approx([2000, 2**14, 0.2329] * 2, rel=1e-3)
    assert [row["predicted from"] for row in times[::3]] == ["dgx-h200", "rates measured now"]
    assert times[0]["ratio"] == pytest.approx(2000 / times[0]["predicted"]) == pytest.approx(1 / times[1]["ratio"])
    assert times[3]["predicted"] > 2 * times[0]["predicted"]  # an A100 has less than half of the rates


def test_waits_are_counted():
    with common.synchronisations(CPU) as counted:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert counted() == 1


def test_a_slot_is_filled_with_the_most_useful_stages(tmp_path, capsys):
    path = tmp_path / "check.jsonl"
    report = common.CheckReport(path)
    report.write(setup={})
    report.add("compiled", dim=64)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"setup": {}},
        {"table": "compiled", "dim": 64},
    ]
    assert gpu_check.finished_stages(path) == []  # a stage that was cut off runs again
    report.write(stage="compile", seconds=1.0, bars=[])
    assert gpu_check.main(["--plan", "--output", str(path), "--seconds", str(SECONDS["blocks"] + 40)]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in planned[:-1]] == ["blocks", "nccl"]
    assert "not now: strategies, training" in planned[-1]
    assert gpu_check.main(["--plan", "--output", str(path), "--stage", "te", "compile"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["te", "compile", "together"]
    path.write_text("{}\nno JSON")
    with pytest.raises(UsageError, match="line 2 is not of an earlier check"):
        gpu_check.finished_stages(path)


def test_kernels_that_do_not_compile_are_counted(monkeypatch):
    def fails(device, dtype, dim, name, **options):
        if options["softcap"]:
            raise RuntimeError("out of registers")
        return OneLaunch()

    monkeypatch.setattr(compile, "kernel_for", fails)
    report = common.CheckReport()
    (bar,) = run_stage("compile", report, ["triton"], TINY, Host(CPU, 1, None, None))
    wrong = [row for row in report.numbers["compiled"] if row["wrong"]]
    assert (bar["reached"], bar["verdict"]) == (len(wrong), "FAIL")
    assert {(row["softcap"], row["wrong"]) for row in wrong} == {(errors.SOFTCAP, "RuntimeError: out of registers")}
    assert len(report.numbers["compiled"]) == len(compile.sets(TINY)) > len(wrong)


def test_without_a_gpu_one_line_says_so(tmp_path):
    """From a checkout that is not installed, on a host with few packages besides torch."""
    for package in ("rich", "matplotlib", "yaml"):
        (tmp_path / f"{package}.py").write_text("raise ImportError")
    tool = Path(__file__).parents[2] / "tools" / "gpu_check.py"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, tool], capture_output=True, text=True, cwd=tmp_path, env=environment)
    expected = "gpu_check.py: error: needs a CUDA GPU, and this host has none; run it on a host with one\n"
    assert (done.returncode, done.stderr) == (2, expected)
