"""A small training run from its command line, with data from files, on ranks that are there already."""

import time
from pathlib import Path
from unittest import mock

from megatron.core import parallel_state

from megatron.context_parallel.trainer import training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.save_load import Save
from megatron.context_parallel.trainer.data.batches import build_data_iterator, build_datasets
from megatron.context_parallel.trainer.data.tokenizer import build_tokenizer
from tests.support.data_case import corpus
from tests.support.training_case import Recorder, build, forget_graphs, groups

SEQUENCE = 64
MODEL = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --init-method-std 0.1 --seq-length {SEQUENCE} --transformer-impl local
    --tokenizer-type ByteLevelTokenizer --make-vocab-size-divisible-by 1
"""
RUN = """
    --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --eval-iters 0 --split 100,0,0 --num-workers 0
    --lr 1e-2 --reset-attention-mask
"""
SHARED = "--dynamic-context-parallel --cp-strategy direct"
DYNAMIC = f"{SHARED} --use-distributed-optimizer"
SPREADS = {  # flags on 4 ranks whose losses are those of one rank: two data-parallel ranks share their documents
    "cp2 dp2": f"--context-parallel-size 2 {DYNAMIC} --max-seqlen-per-dp-cp-rank 32",
    "dp4": f"{DYNAMIC} --max-seqlen-per-dp-cp-rank 128",
    "tp2 dp2": f"--tensor-model-parallel-size 2 --sequence-parallel {DYNAMIC}",
    "pp2 dp2": f"--pipeline-model-parallel-size 2 {DYNAMIC} --max-seqlen-per-dp-cp-rank 64",
    "cp2 dp2 fsdp2": f"--context-parallel-size 2 --use-torch-fsdp2 {SHARED}",
    "cp2 dp2 heads": f"--context-parallel-size 2 --cp-head-parallel-size 2 {DYNAMIC}",
    "cp2 dp2 kept": f"""--context-parallel-size 2 {DYNAMIC} --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1 --recompute-whitelist core_attention""",
}


def prepare(folder: Path) -> str:
    """Writes a corpus; the flags that name it and where the first weights are, or will be saved."""
    return f"--data-path {corpus(folder)} --load {folder / 'start'} --finetune"


def save_start(data: str, model: str = MODEL + RUN) -> None:
    """Saves the weights from which all runs start, on one rank."""
    args = parse_args(f"{model} {data}".replace("--load", "--save").replace("--finetune", "").split())
    Path(args.save).mkdir()
    with groups(args):
        Save(args, build(args)).finish()


def train(data: str, flags: str = "", model: str = MODEL + RUN) -> Recorder:
    """The losses and gradient norms of a run."""
    args = parse_args(f"{model} {data} {flags}".split())
    recorder = Recorder()
    with groups(args):
        state = build(args)
        dataset = build_datasets(args, build_tokenizer(args), training.samples_needed(args))[0]
        rank, note = parallel_state.get_data_parallel_rank(), state.findings.note_data
        batches = [build_data_iterator(dataset, args, 0, rank, args.data_parallel_size, note) for _ in state.model]
        with mock.patch("builtins.print"):
            training.train_loop(args, state, recorder, batches, None, time.monotonic())
        forget_graphs(state.model)
    return recorder
