"""A training step of a Llama of 1.5B parameters beside what is predicted for it. Each run is a process of its own."""

import json
import tempfile
from pathlib import Path

import torch

from .common import CheckReport, has_megatron
from .job import end, start

PROGRAM = """
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.commands.gpu_checks.step_run import main
run_main(main, "training step")
"""
MODEL = (
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --vocab-size 128255"
)
FLAGS = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --recompute-whitelist core_attention qkv proj "
    "--mock-data --tokenizer-type NullTokenizer --split 100,0,0 --eval-iters 0 --num-workers 0 "
    "--micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --transformer-impl local"
)
LIMIT = 240  # seconds of a run


def check_step(report: CheckReport, table: str, run: tuple[int, int], device: torch.device) -> None:
    """Adds the rows of a run of (tokens, iterations); or why it was skipped.

    Of sequences that do not fit the GPU by the dry run, half of the tokens are taken, until they fit.
    """
    if not has_megatron(report, table):
        return
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        tokens, iterations = map(str, run)
        flags = [*MODEL.split(), *FLAGS.split(), "--train-iters", iterations]
        wrong = end(start(PROGRAM, [str(rows), tokens, *flags], log, gpu=device.type == "cuda"), log, LIMIT)
        for line in rows.read_text().splitlines() if rows.exists() else []:
            report.add(table, **json.loads(line))
        if wrong:
            report.add(table, what="the run", wrong=wrong, verdict="FAIL")
