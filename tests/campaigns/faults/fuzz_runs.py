"""Runs command lines that were accepted, and compares their losses with those of one rank."""

import re
import shutil
from pathlib import Path
from random import Random

from megatron.context_parallel.trainer.config.flags import FLAGS, Arguments

from .bench import Bench, losses
from .fuzz_flags import Found
from .job import run_job

LINE = tuple[list[str], int, Arguments]
MOST = {  # larger runs take too long
    "num_layers": 8,
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    "num_attention_heads": 16,
    "kv_channels": 64,
    "seq_length": 512,
    "max_position_embeddings": 4096,
    "global_batch_size": 16,
    "padded_vocab_size": 4096,
}
ITERATIONS = 3
CLOSE = 1e-5
CLOSE_16_BIT = 2e-2
ONE_RANK = {  # flags that need several ranks
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
}


def can_run(line: LINE, data: Path) -> bool:
    """Whether a command line is tiny, for 2 to 4 ranks, and otherwise like the one it began as."""
    _, ranks, args = line
    small = all(getattr(args, name) <= most for name, most in MOST.items())
    plain = args.hidden_dropout == 0 and not args.dry_run and args.data_path == [str(data)] and args.lr <= 0.1
    kept = not any((args.data_cache_path, args.no_save_optim, args.no_load_optim, args.finetune, args.fp16))
    return small and plain and kept and 2 <= ranks <= 4


def pick(found: Found, count: int, seed: int, data: Path) -> list[LINE]:
    """`count` command lines that can run, of those that were accepted."""
    able = [line for line in found.accepted if can_run(line, data)]
    return Random(seed).sample(able, min(count, len(able)))


def compare(bench: Bench, line: LINE) -> str:
    """The fault of a run: why its losses differ from those of one rank, or nothing.

    One rank makes the initial weights, because each parallel layout draws its own, and does all iterations. The ranks
    resume after its first iteration.
    """
    words, ranks, args = line
    alone, together = bench.fresh("one rank"), bench.fresh("ranks")
    argv = words + _ends(alone)
    outcome = run_job(_on_one_rank(argv, args), 1, ends_others=True)
    if outcome.statuses != {0: 0}:
        return f"one rank fails: {outcome.text[-600:]}"
    for path in alone.glob("iter_*1"):
        shutil.copytree(path, together / path.name)
    (together / "latest_checkpointed_iteration.txt").write_text("1")
    outcome = run_job([*words, *_ends(together), "--load", str(together), "--no-load-rng"], ranks)
    if set(outcome.statuses.values()) != {0}:
        return f"{ranks} ranks fail: {outcome.text[-900:]}"
    pairs = zip(losses(alone)[1:], losses(together), strict=True)
    close = CLOSE_16_BIT if args.bf16 else CLOSE
    off = [abs(one["lm_loss"] - many["lm_loss"]) / one["lm_loss"] for one, many in pairs]
    return "" if max(off) <= close else f"losses differ by {off} (relative)"


def _ends(save: Path) -> list[str]:
    return (
        f"--train-iters {ITERATIONS} --lr 1e-3 --min-lr 0 --eval-iters 0 --log-interval 1 --num-workers 0 "
        f"--save {save} --save-interval 1"
    ).split()


def _on_one_rank(argv: list[str], args: Arguments) -> list[str]:
    """The same command line for one rank: without parallel sizes, and with a strategy that supports one rank."""
    kept, skip = [], False
    dropped = {FLAGS[name].option for name in ONE_RANK}
    for word in argv:
        if re.match("--", word):
            skip = word.split("=")[0] in dropped or word.startswith("--cp-")
        if not skip:
            kept.append(word)
    return [*kept, "--global-batch-size", str(args.global_batch_size)]
