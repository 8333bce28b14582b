"""The benchmarks check what they time, skip wrong results, and report mistakes in one line."""

import csv
import importlib
import itertools
import json
import math
import sys
import types
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from unittest import mock

import matplotlib.image
import pytest
import torch
import torch.distributed._functional_collectives as functional
from megatron.core.tensor_parallel import layers
from torch.distributed import Work

from benchmarks import attention_rank, predicted, training_rank, training_step
from benchmarks.attention import main
from benchmarks.cases import PRESETS, Case, Workload, parse_case, preset
from benchmarks.device import PYTHON
from benchmarks.peers import PEERS, cpu_flash
from benchmarks.report import COLUMNS, speed_up, summarize
from benchmarks.stopwatch import Stopwatch
from benchmarks.volume import planned_bytes
from megatron.context_parallel import UsageError
from megatron.context_parallel.attention import torch_op as attention_module
from megatron.context_parallel.cluster.description import load_cluster, save_cluster
from megatron.context_parallel.cluster.step.layer_time import OF_PEAK
from megatron.context_parallel.integration import spec
from megatron.context_parallel.kernels.reference import attention
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.layout import positions

ROOT = Path(__file__).parents[2]
LINEAR = "linear_with_grad_accumulation_and_async_allreduce"
PROBLEM = Workload(ranks=3, length=384, batch=1, heads=6, kv_heads=6, head_dim=32, dtype="fp32", causal=True)
STRATEGIES = ["ring", "attention2d:grid=3x1", "ulysses"]


def test_a_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    sizes = "--num-attention-heads 6 --kv-channels 32 --seq-length 384 --rounds 2"
    flags = ["--ranks", "3", *sizes.split(), "--output", str(tmp_path), "--strategies", *STRATEGIES]
    monkeypatch.setattr(sys, "argv", ["benchmarks/attention.py", *flags])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "")  # put back what the benchmark changes
    assert main() == 0
    printed = capsys.readouterr().out
    cells = [line.split() for line in printed.splitlines() if line.startswith(tuple(STRATEGIES))]
    assert [row[0] for row in cells] == STRATEGIES * 3 and cells[0][3] == "1.00"  # time, its parts, bytes
    assert [len(row) for row in cells] == [6] * 3 + [5] * 3 + [5] * 3
    check_rows(list(csv.DictReader((tmp_path / "rounds.csv").open())))
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["problem"] == asdict(PROBLEM)
    surroundings = run["surroundings"]
    assert surroundings["versions"]["torch"] == metadata.version("torch")
    assert surroundings["cluster"]["ranks_per_node"] == 3
    words = ["--output", tmp_path.name, "--strategies", *STRATEGIES]  # paths of this machine are not published
    assert surroundings["command"] == ["python", "benchmarks/attention.py", "--ranks", "3", *sizes.split(), *words]
    for entry in run["entries"]:
        summary = run["summaries"][entry["case"]]
        assert entry["error"] < 1e-5 and len(entry["rounds"]) == 2
        assert sum(summary["parts"].values()) == pytest.approx(summary["median"])
        assert summary["off_plan"] < 0.02, f"{entry['case']}: {summary['received']} {entry['planned']}"
    assert matplotlib.image.imread(tmp_path / "times.png").shape[2] in (3, 4)


def check_rows(rows: list[dict]) -> None:
    """Every case, round and rank once, interleaved; the parts of each add up; the bytes are the plan's."""
    assert list(rows[0]) == list(COLUMNS)
    places = [(row["case"], row["round"], row["rank"]) for row in rows]
    assert sorted(places) == sorted(itertools.product(STRATEGIES, "01", "012"))
    for row in rows:
        seconds, *parts = (float(row[name]) for name in ("seconds", "kernel", "wait", "other"))
        assert seconds == pytest.approx(sum(parts)) and min(parts) >= 0 and parts[0] > 0
        assert int(row["received"]) == pytest.approx(int(row["planned"]), rel=0.02), row
        assert row["link_received"] == ""


def test_volume_by_hand():
    def planned(text: str, problem: Workload) -> list[int]:
        return planned_bytes(parse_case(text).plans(problem), problem)

    tokens = 2 * 256 // 4  # of a rank, both samples
    problem = Workload(4, 256, 2, 8, 2, 16, "bf16", True)
    q, kv, rows = tokens * 8 * 16 * 2, 2 * tokens * 2 * 16 * 2, tokens * 8 * 4
    assert planned("ring", problem) == [3 * kv + 3 * kv + 3 * 2 * kv] * 4  # KV, KV again, float32 DKV
    o, qdo, dq = 2 * q + rows, 2 * q + 2 * rows, 2 * q
    assert planned("mesh:grid=4x1", problem) == [3 * q + 3 * o + 3 * qdo + 3 * dq] * 4
    swaps = q + kv + (q + rows) + (q + rows) + q + kv  # Q KV; O lse; dO delta; dQ dKV, all in 16 bits
    assert planned("usp:head_parallel_size=2", problem) == [swaps // 2 + kv + kv + 2 * kv] * 4
    replicated = 2 * kv + 4 * kv  # two copies of each head; their gradients are float32
    assert planned("ulysses", problem) == [(4 * q + 2 * rows + replicated) * 3 // 4] * 4
    helpers = planned("lightseq", problem)
    assert len(set(helpers)) > 1  # ranks differ, so each is compared with its own


def test_figures_of_a_case():
    def ranks(*seconds: float) -> list[dict]:
        rest = {"kernel": 1.0, "wait": 0.5, "received": 102, "link_received": None}
        return [{"seconds": s, "other": s - 1.5} | rest for s in seconds]

    entry = {"rounds": [ranks(2, 4), ranks(3, 8), ranks(2, 5)], "planned": [100, 102]}
    summary = summarize(entry)
    assert summary["times"] == [4, 8, 5] and summary["median"] == 5 and summary["spread"] == pytest.approx(0.8)
    assert summary["parts"] == {"kernel": 1.0, "wait": 0.5, "other": 2.0, "idle": 1.5}
    assert summary["off_plan"] == pytest.approx(0.02) and summary["received"] == summary["planned"] == 102
    assert speed_up({"times": [8, 8, 20]}, summary) == pytest.approx(2)  # of 2, 1 and 4
    assert summarize({"rounds": [], "planned": None}) is None


# ------------------------------------------------------------------------------------------------- peers


class WrongAdapter:
    """Attends within its own tokens only."""

    order = "bshd"

    def __init__(self, problem, group, flash):
        self.rank, self.ranks = group.rank(), problem.ranks

    def positions(self, length):
        return positions("contiguous", self.rank, self.ranks, length)

    def attend(self, q, k, v):
        return cpu_flash.FlashAttention.apply(
            q, k, v, 1 / math.sqrt(q.shape[-1]), True, cpu_flash.CpuFlash(Stopwatch())
        )


def quietly(measure, job: dict) -> list[dict]:
    """`measure` in a process that runs other tests later, whose waits and kernels must not be timed."""
    broken = types.SimpleNamespace(Adapter=WrongAdapter)
    with (
        mock.patch.object(Work, "wait", Work.wait),
        mock.patch.object(functional, "wait_tensor", functional.wait_tensor),
        mock.patch.object(attention_module, "kernel_for", attention_module.kernel_for),
        mock.patch.object(spec, "kernel_for", spec.kernel_for),
        mock.patch.object(layers, LINEAR, getattr(layers, LINEAR)),
        mock.patch.dict(PEERS, wrong=("wrong", ""), absent=("absent", "")),
        mock.patch.dict(sys.modules, {"benchmarks.peers.wrong": broken}),
    ):
        return measure(job)


def test_what_is_not_exact_or_not_there_is_not_timed(ranks):
    cases = ["ring", "peer:wrong", "peer:absent", "peer:torch", "peer:torch:rotate=allgather"]
    problem = Workload(2, 128, 2, 2, 2, 16, "fp32", True)
    job = {"problem": asdict(problem), "cases": cases, "rounds": 2, "warm_up": 0, "cluster": None}
    both = ranks(2, quietly, attention_rank.measure, job)
    assert both[0] == both[1]
    by_case = {entry["case"]: entry for entry in both[0]}
    assert list(by_case) == cases
    assert by_case["peer:wrong"]["failure"].startswith("ValueError: not exact: relative error of ")
    assert by_case["peer:absent"]["failure"].startswith("ModuleNotFoundError: ")
    for case in ("peer:wrong", "peer:absent"):
        assert by_case[case]["rounds"] == [] and by_case[case]["error"] is None
    for case in ("ring", "peer:torch", "peer:torch:rotate=allgather"):
        entry = by_case[case]
        assert entry["failure"] is None and entry["error"] < 1e-5 and len(entry["rounds"]) == 2, entry["failure"]
        for rank in (rank for of_ranks in entry["rounds"] for rank in of_ranks):
            assert rank["kernel"] > 0 and rank["wait"] > 0
            assert rank["seconds"] == pytest.approx(rank["kernel"] + rank["wait"] + rank["other"])


def test_devices_that_are_too_fast_for_python_are_refused(ranks, tmp_path):
    """After the results were checked; strategies and peers alike."""
    save_cluster(load_cluster("dgx-h100").part(2), tmp_path / "cluster.yaml")
    problem = Workload(2, 64, 1, 2, 2, 16, "fp32", True)
    job = {"problem": asdict(problem), "cases": ["ring", "peer:torch"], "rounds": 1, "warm_up": 1}
    job["cluster"] = str(tmp_path / "cluster.yaml")
    for entry in ranks(2, quietly, attention_rank.measure, job)[0]:
        assert entry["error"] < 1e-5 and entry["rounds"] == [], entry["failure"]
        assert entry["failure"].startswith("Python's own time of a pass is ")
        assert entry["python"]["seconds"] > PYTHON * entry["python"]["device_seconds"] > 0


@pytest.mark.parametrize("kv_heads,causal", [(4, True), (2, True), (1, False)])
def test_peers_compute_with_an_exact_kernel(kv_heads, causal):
    """Called by the names that libraries import from flash-attn."""
    with mock.patch.dict(sys.modules):
        cpu_flash.install(cpu_flash.CpuFlash(watch := Stopwatch()))
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    torch.manual_seed(kv_heads)
    q, k, v, dout = (torch.randn(2, 24, heads, 8) for heads in (4, kv_heads, kv_heads, 4))
    leaves = [x.transpose(0, 1).double().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = attention(*leaves, causal=causal, scale=0.3)
    grads = torch.autograd.grad(exact, leaves, dout.transpose(0, 1).double())
    out, lse, *_ = interface._flash_attn_forward(q, k, v, 0.0, 0.3, causal, -1, -1, 0.0, None, False)
    into = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *into, 0.0, 0.3, causal, -1, -1, 0.0, None, False)
    for got, expected in zip([out, *into], [exact, *grads], strict=True):
        torch.testing.assert_close(got.double(), expected.transpose(0, 1).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse.permute(1, 2, 0).detach(), rtol=1e-5, atol=1e-5)
    assert watch.seconds["kernel"] > 0


# ------------------------------------------------------------------------------------------- training step


TINY = [*training_step.LLAMA.split(), "--seq-length", "64", "--hidden-size", "32", "--num-attention-heads", "4"]
TINY += ["--num-query-groups", "2", "--kv-channels", "16", "--context-parallel-size", "2"]
TINY_JOB = {"problem": asdict(Workload(2, 64, 1, 4, 2, 16, "fp32", True)), "flags": TINY, "rounds": 2, "warm_up": 1}
TINY_JOB |= {"products_of": None, "stands_for": 64}


def test_training_steps_train_alike(ranks):
    """Also with documents, of which a placement keeps each on one rank: keys are not sent."""
    cases = ["ring", "placed:mesh:grid=2x1"]
    problem = TINY_JOB["problem"] | {"documents": (32, 32)}
    job = TINY_JOB | {"cases": cases, "recompute": True, "cluster": None, "problem": problem}
    entries = ranks(2, quietly, training_rank.measure, job)[0]
    assert [entry["case"] for entry in entries] == [case + how for case in cases for how in training_rank.RECOMPUTATION]
    for entry in entries:
        assert entry["failure"] is None and entry["error"] < 1e-5 and len(entry["rounds"]) == 2
        assert all(rank["kernel"] > 0 and rank["received"] > 0 for of_ranks in entry["rounds"] for rank in of_ranks)
    received = [sum(rank["received"] for rank in entry["rounds"][0]) for entry in entries]
    rows = 16 + 16  # of keys that one rank has and the other sees, in zigzag
    sent = 2 * 3 * rows * 2 * 2 * 16 * 4  # two layers; keys and values in both passes, and their gradients
    assert received[0] - received[len(training_rank.RECOMPUTATION)] == pytest.approx(
        sent, rel=0.1
    )  # beside plans and losses


def test_products_take_the_share_that_they_have_in_a_larger_model(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = training_step.trainer_args(TINY, 2)
    device = mock.Mock(device=replace(load_cluster("dgx-h100").device, memory_GB_s=1e9))
    own, like = (training_rank.product_times(args, preset, 8192, device) for preset in (None, "llama3-8b"))
    # A layer of Llama 3 8B has 218.1M weights in products and attention of width 4096; this one has width 64.
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    seconds = 2 * 32 * layer / (OF_PEAK * device.device.peak_TFLOP_s * 1e12)
    assert sum(like.products.values()) == pytest.approx(seconds * 64 / 4096)
    assert like.slower > 10 and own.slower == 1


def test_training_steps_on_devices_are_computed_before(ranks, tmp_path):
    """The losses of the first step are compared; then the devices, which are too fast here, take their time."""
    save_cluster(load_cluster("dgx-h100").part(2), tmp_path / "cluster.yaml")
    job = TINY_JOB | {"cases": ["ring", "allgather"], "recompute": False, "cluster": str(tmp_path / "cluster.yaml")}
    for entry in ranks(2, quietly, training_rank.measure, job)[0]:
        assert entry["error"] < 1e-5 and entry["failure"].startswith("Python's own time of a pass is ")
        assert entry["python"]["seconds"] > PYTHON * entry["python"]["device_seconds"] > 0


# --------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("file,run", [("unshaped-1", "unshaped-1"), ("train-un", "un-train-ring")])
def test_predictions_stand_beside_what_was_measured(file, run, capsys):
    folder = Path("docs/benchmarks/results/predicted")
    predicted.main([str(folder / f"{file}.yaml"), str(folder / run)])
    lines = capsys.readouterr().out.splitlines()
    summaries, found = json.loads((folder / run / "run.json").read_text())["summaries"], []
    for case, summary in summaries.items():
        line = next(line for line in lines if line.startswith(f"{case}  "))
        told, measured, _, error = line.removeprefix(case).split()
        assert float(measured) == pytest.approx(summary["median"], abs=6e-4)
        assert float(error.rstrip("%")) == pytest.approx(100 * (float(told) / float(measured) - 1), abs=0.2)
        found.append(float(told))
    assert len(found) == 3
    if file == "train-un":
        plain, recomputed, kept = found
        assert plain < kept < recomputed


def test_predictions_in_the_wrong_order_are_named():
    measured = {"a": {"median": 2.0, "times": [1.9, 2.0]}, "b": {"median": 1.0, "times": [1.0]}}
    assert predicted.wrong_order({"a": 1.0, "b": 1.1}, measured) == ["wrong order: a was slower than b"]
    assert not predicted.wrong_order({"a": 1.1, "b": 1.0}, measured)
    measured["a"]["times"].append(0.9)  # the rounds overlap
    assert not predicted.wrong_order({"a": 1.0, "b": 1.1}, measured)


def test_a_training_step_is_predicted_before_it_is_measured(capsys):
    flags = "dgx-a100 --training-step -- --ranks 4 --recompute --strategies ring --output none"
    predicted.main(flags.split())
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ring")]
    assert [row.rsplit(maxsplit=1)[0].strip() for row in rows] == ["ring" + how for how in training_rank.RECOMPUTATION]


# ------------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("n", [4, 16])
def test_presets_are_cases_that_work(name, n):
    problem = Workload(n, 32 * n, 1, 8, 8, 8, "fp32", True)
    cases = [parse_case(text) for text in preset(name, problem)]
    assert len(cases) > 1 and all(planned_bytes(case.plans(problem), problem) for case in cases)


def test_options_of_a_case():
    text = "mesh:grid=4x2,layout=zigzag"
    assert parse_case(text) == Case(text, "mesh", parse_spec("mesh", layout="zigzag", grid=(4, 2)))
    assert parse_case("lightseq:balance=no,prefetch=yes").choice.options == {"balance": False, "prefetch": True}
    assert parse_case("peer:yunchang:ulysses=2") == Case("peer:yunchang:ulysses=2", "yunchang", None, {"ulysses": 2})


@pytest.mark.parametrize(
    "argv,words",
    [
        ("--ranks 4 --strategies spiral", ["--cp-strategy spiral", "ring", "my_file.py:my_strategy"]),
        ("--ranks 4 --strategies peer:spiral", ["--strategies peer:spiral", "yunchang"]),
        ("--ranks 4 --strategies mesh:grid", ["--cp-strategy mesh:grid", "grid has no value", "mesh:OPTION=VALUE"]),
        ("--ranks 4 --strategies mesh:grid=3x3", ["--cp-grid 3x3", "2x2"]),
        ("--ranks 4 --strategies ring:grid=2x2", ["--cp-grid 2x2", "not an option of ring"]),
        ("--ranks 4 --strategies ring ring", ["--strategies ring", "once"]),
        ("--ranks 4 --preset everything", ["--preset everything", "balance"]),
        ("--ranks 4 --strategies ring --seq-length 100", ["--seq-length 100", "such as 96"]),
        ("--ranks 4 --strategies ring --rounds 0", ["--rounds 0", "at least 1"]),
        ("--ranks 4 --strategies ulysses --num-attention-heads 6", ["--cp-head-parallel-size 4", "1, 2, 3, 6"]),
        ("--ranks 4 --strategies ring --num-query-groups 3", ["--num-query-groups 3", "divide"]),
        ("--strategies ring", ["--ranks 4", "--nodes 4"]),
        ("--ranks 4 --nodes 2 --strategies ring", ["--ranks 4", "--nodes 4"]),
        ("--ranks 4 --node-rate 1gbit --strategies ring", ["--node-rate 1gbit", "--nodes 4"]),
        ("--nodes 2 --node-rate 100 --strategies ring", ["--node-rate 100", "100mbit"]),
    ],
)
def test_mistakes(argv, words, tmp_path):
    with pytest.raises(UsageError) as caught:
        main([*argv.split(), "--output", str(tmp_path)])
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_a_folder_that_cannot_be_made_is_found_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output .*file/out: Not a directory; give"):
        main(["--ranks", "2", "--strategies", "ring", "--output", str(tmp_path / "file" / "out")])


@pytest.mark.parametrize(
    "argv,words",
    [
        ("--ranks 2 --strategies peer:torch", ["--strategies peer:torch", "ring"]),
        ("--ranks 2 --strategies ring -- --hidden-sise 3", ["--hidden-sise", "--hidden-size"]),
        ("--ranks 2 --strategies ring -- --global-batch-size 4", ["--global-batch-size", "leave"]),
        ("--ranks 2 --rounds 0 --strategies ring", ["--rounds 0", "at least 1"]),
        ("--ranks 2 --strategies ring --products-of llama3-8b", ["--products-of llama3-8b", "--devices"]),
    ],
)
def test_mistakes_of_training_steps(argv, words, tmp_path):
    own, _, trainer = argv.partition(" -- ")
    with pytest.raises(UsageError) as caught:
        training_step.main([*own.split(), "--output", str(tmp_path), "--", *trainer.split()])
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line
