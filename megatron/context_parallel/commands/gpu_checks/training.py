"""Trains a small Llama on a CPU, and resumes from its checkpoint on the GPU: the losses must be those of the CPU."""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from .common import CheckReport, CheckSizes, has_megatron
from .job import end, start

TABLE = "training"
PROGRAM = "from megatron.context_parallel.commands.programs import pretrain; pretrain()"
MODEL = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 512 --seq-length {0} --max-position-embeddings {0} "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --split 100,0,0 --eval-iters 0 --num-workers 0 "
    "--log-interval 1 --train-iters {1}"
)
# Absolute. On a CPU, other vector instructions change the losses by 2e-7, and bf16 by 2e-3.
BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
LIMIT = 120  # seconds of a run


class Run(NamedTuple):
    """A run on the GPU from the middle of the CPU's."""

    backend: str
    dtype: str
    sharding: str = "none"  # each has an optimizer of its own

    @property
    def flags(self) -> list[str]:
        flags = ["--cp-attention-backend", self.backend]
        if self.dtype == "bfloat16":
            flags.append("--bf16")
        return flags if self.sharding == "none" else [*flags, f"--{self.sharding}"]


RUNS = [Run(backend, dtype) for dtype in BOUNDS for backend in ("auto", "triton")]
RUNS += [Run("auto", "float32", sharding) for sharding in ("use-distributed-optimizer", "use-torch-fsdp2")]


def check_training(report: CheckReport, sizes: CheckSizes, device: torch.device) -> None:
    """The largest difference of a loss between the GPU and the CPU; or why it was skipped. The runs are processes."""
    if not has_megatron(report, TABLE):
        return
    middle, last = sizes.iterations
    model = MODEL.format(sizes.training_rows, last).split()
    with tempfile.TemporaryDirectory() as folder:
        whole, *parts = (Path(folder) / name for name in ("cpu", *map("-".join, RUNS)))
        logs = {run: run.with_suffix(".log") for run in (whole, *parts)}
        words = [*model, "--save", str(whole), "--save-interval", str(middle)]
        if wrong := end(start(PROGRAM, words, logs[whole], gpu=False), logs[whole], LIMIT):
            report.add(TABLE, backend="cpu", dtype="float32", wrong=wrong, verdict="FAIL")
            return
        resume = [*model, "--load", str(whole), "--ckpt-step", str(middle)]
        jobs = []
        for run, part in zip(RUNS, parts, strict=True):
            words = [*resume, "--save", str(part), *run.flags]
            jobs.append(start(PROGRAM, words, logs[part], gpu=device.type == "cuda"))
        for run, part, job in zip(RUNS, parts, jobs, strict=True):
            wrong, bound = end(job, logs[part], LIMIT), BOUNDS[run.dtype]
            difference = None if wrong else _difference(_losses(part), _losses(whole), range(middle + 1, last + 1))
            verdict = "PASS" if difference is not None and difference <= bound else "FAIL"
            row = {**run._asdict(), "iterations": last - middle, "difference": difference, "bound": bound}
            report.add(TABLE, **row, wrong=wrong, verdict=verdict)


def _losses(run: Path) -> dict[int, float]:
    """The loss of each iteration."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


def _difference(got: dict[int, float], expected: dict[int, float], iterations: range) -> float:
    """The largest difference; infinite or NaN losses of one run differ infinitely."""
    apart = [abs(got[i] - expected[i]) for i in iterations]
    return max(apart) if all(x == x for x in apart) else float("inf")
