"""Every mistake prints one clear line with the flag, its value and a value that works. Tests then use it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.context_parallel.cli import run_main as run
from megatron.context_parallel.commands import programs
from megatron.context_parallel.integration.transformer_engine import why_not_importable
from megatron.context_parallel.trainer.arguments import complete as arguments
from megatron.context_parallel.trainer.arguments.complete import parse_args

ROOT = Path(__file__).parents[2]
RUN = "--preset tiny-llama --micro-batch-size 1 --train-iters 10 --lr 1e-3 --data-path {data}"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a mistake only where there is no GPU")
without_te = pytest.mark.skipif(not why_not_importable(), reason="Transformer Engine is here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files right and wrong, to be named in the rows below."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, largest in (("data", 255), ("large_ids", 40000)):
        builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=numpy.int32)
        builder.add_document(numpy.linspace(0, largest, 500).astype(numpy.int32), [500])
        builder.finalize(f"{folder}/{name}.idx")
    index, data = (folder / "data.idx").read_bytes(), (folder / "data.bin").read_bytes()
    for name, bad_index, bad_data in (
        ("cut_index", index[:-5], data),
        ("short_index", index[:20], data),
        ("garbage", b"not an index" * 10, data),
        ("version", index[:9] + b"\x07" + index[10:], data),
        ("cut_data", index, data[:-40]),
        ("other_tokenizer", index, data),
        ("other_vocabulary", index, data),
        ("bad_description", index, data),
    ):
        (folder / f"{name}.idx").write_bytes(bad_index)
        (folder / f"{name}.bin").write_bytes(bad_data)
    made = ("tokenizer", "SentencePieceTokenizer", "my.model"), ("vocabulary", "ByteLevelTokenizer", None)
    for name, kind, model in made:
        made_by = {"tokenizer_type": kind, "tokenizer_model": model, "vocab_size": 300}
        (folder / f"other_{name}.json").write_text(json.dumps(made_by))
    (folder / "bad_description.json").write_text("{}")
    (folder / "only_index.idx").write_bytes(index)
    _checkpoint(folder / "trained", {"num_layers": 2, "swiglu": True, "vocab_size": 257})
    _checkpoint(folder / "deeper", {"num_layers": 7})
    _checkpoint(folder / "gelu", {"swiglu": False})
    _checkpoint(folder / "biased", {"add_bias_linear": True})
    _checkpoint(folder / "longer", {"max_position_embeddings": 256})
    _checkpoint(folder / "old_optimizer", {"use_distributed_optimizer": False})
    _checkpoint(folder / "unreadable", {}, tracker="soon")
    _checkpoint(folder / "incomplete", {}, tracker="9")
    _checkpoint(folder / "windowed", {"window_size": [64, 0]})
    _checkpoint(folder / "documents", {"reset_attention_mask": True})
    _checkpoint(folder / "other_seed", {"seed": 7})
    _checkpoint(folder / "other_data", {"data_path": ["elsewhere"]})
    _checkpoint(folder / "long_sequences", {"seq_length": 256})
    _checkpoint(folder / "finetuned", {"finetune": True})
    (folder / "file").write_text("in the way of a directory")
    (folder / "empty").mkdir()
    (folder / "unknown_key.yaml").write_text("num_layer: 4\ntrain-iter: null\n")
    (folder / "wrong_type.yaml").write_text("num-layers: many\n")
    (folder / "switch_value.yaml").write_text("swiglu: 3\n")
    (folder / "list_value.yaml").write_text("split: [90, 10]\n")
    (folder / "no_switch.yaml").write_text("num-layers: false\n")
    (folder / "broken.yaml").write_text("num-layers: 4\n  hidden-size: [\n")
    (folder / "list.yaml").write_text("- num-layers\n")
    (folder / "nested.yaml").write_text("config: other.yaml\n")
    return folder


def _checkpoint(directory: Path, args: dict, tracker: str = "3") -> None:
    (directory / "iter_0000003").mkdir(parents=True)
    (directory / "iter_0000003" / "args.json").write_text(json.dumps(args))
    for part in (".metadata", "metadata.json", "common.pt"):
        (directory / "iter_0000003" / part).write_text("{}")
    (directory / "latest_checkpointed_iteration.txt").write_text(tracker)


# (flags beside RUN, WORLD_SIZE, what the line must contain, flags it recommends if they are all that it takes)
# fmt: off
MISTAKES = [
    # spelling
    ("--num-layer 4", 1, ["--num-layer:", "--num-layers"], None),
    ("--num-layers 1000000000", 1, ["--num-layers 1000000000", "10000 at most, such as 24"], None),
    ("--cp-stategy ring", 1, ["--cp-stategy", "--cp-strategy"], None),
    ("--bf16 ring", 1, ["--bf16: followed by ring, which is neither flag nor value; give --bf16"], None),
    ("--num-layers four", 1, ["--num-layers four", "a whole number, 1 or more"], "--num-layers 24"),
    ("--lr fast", 1, ["--lr fast", "a number, above 0"], "--lr 0.0003"),
    ("--normalization BatchNorm", 1, ["--normalization", "BatchNorm", "RMSNorm"], "--normalization RMSNorm"),
    ("--swiglu=yes", 1, ["--swiglu:", "'yes'", "give --swiglu"], "--swiglu"),
    ("--hidden-size", 1, ["--hidden-size:", "expected one argument", "give --hidden-size 1024"], None),
    # presets and files of flags
    ("--preset llama2-70b", 1, ["--preset llama2-70b", "llama2-7b"], "--preset llama2-7b"),
    ("--config {folder}/none.yaml", 1, ["--config", "none.yaml", "cannot be read", "num-layers: 24"], None),
    ("--config {folder}/broken.yaml", 1, ["--config", "broken.yaml", "line 2", "num-layers: 24"], None),
    ("--config {folder}/list.yaml", 1, ["--config", "list.yaml", "num-layers: 24"], None),
    ("--config {folder}/unknown_key.yaml", 1, ["unknown_key.yaml", "--num-layer:", "--train-iters"], None),
    ("--config {folder}/wrong_type.yaml", 1, ["wrong_type.yaml: --num-layers many", "such as 24"], None),
    ("--config {folder}/switch_value.yaml", 1, ["switch_value.yaml: --swiglu 3", "true or false"], None),
    ("--config {folder}/no_switch.yaml", 1, ["no_switch.yaml: --num-layers False", "such as 24"], None),
    ("--config {folder}/list_value.yaml", 1, ["list_value.yaml: --split [", "such as 969,30,1"], None),
    ("--config {folder}/nested.yaml", 1, ["nested.yaml", "without config", "num-layers: 24"], None),
    # single values
    ("--train-iters 0", 1, ["--train-iters 0", "1 or more"], "--train-iters 1000"),
    ("--seq-length -128", 1, ["--seq-length -128", "1 or more"], "--seq-length 2048"),
    ("--micro-batch-size 0", 1, ["--micro-batch-size 0", "1 or more"], "--micro-batch-size 1"),
    ("--lr 0", 1, ["--lr 0:", "above 0"], "--lr 0.0003"),
    ("--lr nan", 1, ["--lr nan", "above 0"], "--lr 0.0003"),
    ("--adam-beta2 1", 1, ["--adam-beta2 1:", "below 1"], "--adam-beta2 0.95"),
    ("--log-interval 0", 1, ["--log-interval 0", "1 or more"], "--log-interval 100"),
    ("--context-parallel-size 0", 1, ["--context-parallel-size 0", "1 or more"], "--context-parallel-size 1"),
    # ranks
    ("--context-parallel-size 4", 6, ["--context-parallel-size 4", "6 ranks", "start 4"], "--context-parallel-size 2"),
    ("--context-parallel-size 2", 1, ["--context-parallel-size 2", "1 ranks", "start 2"], "--context-parallel-size 1"),
    ("--tensor-model-parallel-size 2 --context-parallel-size 2", 2,
     ["--tensor-model-parallel-size 2", "2 ranks", "= 4", "start 4"], "--tensor-model-parallel-size 1"),
    ("", "many", ["WORLD_SIZE=many", "torchrun"], None),
    # model
    ("--hidden-size 66", 1, ["--hidden-size 66", "--num-attention-heads 4"], "--hidden-size 64"),
    ("--num-query-groups 3", 1, ["--num-query-groups 3", "--num-attention-heads 4"], "--num-query-groups 1"),
    ("--max-position-embeddings 64", 1, ["--seq-length 128", "give --seq-length 64, or --max-position-embeddings 128"],
     "--max-position-embeddings 128"),
    ("--kv-channels 15", 1, ["--kv-channels 15", "even"], "--kv-channels 16"),
    ("--kv-channels 12 --rotary-percent 0.3", 1, ["--kv-channels 12", "even"], "--kv-channels 14"),
    ("--num-attention-heads 6 --kv-channels 16 --tensor-model-parallel-size 4", 4,
     ["heads 6", "size 4"], "--num-attention-heads 4"),
    ("--num-query-groups 4 --num-attention-heads 12 --kv-channels 8 --tensor-model-parallel-size 6 --ffn-hidden-size 6",
     6, ["--num-query-groups 4", "--tensor-model-parallel-size 6"], None),
    # context parallelism
    ("--cp-strategy circle", 1, ["--cp-strategy circle", "allgather", "ring"], "--cp-strategy ring"),
    ("--cp-layout striped", 1, ["--cp-layout striped: unknown", "zigzag", "cyclic", "contiguous"],
     "--cp-layout cyclic"),
    ("--cp-grid 2x2 --context-parallel-size 4", 4, ["--cp-grid", "not an option of ring", "attention2d or mesh"], None),
    ("--cp-strategy mesh --context-parallel-size 4 --cp-grid 2x3", 4, ["--cp-grid 2x3", "2x2"], "--cp-grid 2x2"),
    ("--cp-strategy mesh --context-parallel-size 6 --cp-grid square --seq-length 132", 6,
     ["--cp-grid square", "such as 2x3"], "--cp-grid 2x3"),
    ("--cp-strategy attention2d:grid=4x --context-parallel-size 4", 4, ["--cp-grid 4x", "such as 2x2"], None),
    (
        "--cp-strategy mesh --context-parallel-size 2 --cp-q-cost 0",
        2,
        ["--cp-q-transfer-blocks 0", "a number"],
        "--cp-q-transfer-blocks 4",
    ),
    ("--no-cp-overlap", 1, ["--no-cp-overlap", "attention2d"], "--cp-strategy attention2d"),
    ("--no-cp-balance", 1, ["--no-cp-balance", "lightseq"], "--cp-strategy lightseq"),
    ("--cp-strategy loongtrain --context-parallel-size 4 --cp-inner-ring-size 3", 4,
     ["--cp-inner-ring-size 3", "one of 1, 2, 4"], "--cp-inner-ring-size 2"),
    ("--cp-strategy lightseq --cp-layout zigzag", 1, ["--cp-layout zigzag", "contiguous"], "--cp-layout contiguous"),
    ("--cp-head-parallel-size 3 --context-parallel-size 4", 4,
     ["--cp-head-parallel-size 3", "1 or 2 or 4"], "--cp-head-parallel-size 2"),
    ("--cp-strategy ulysses --context-parallel-size 8 --seq-length 128", 8,
     ["--cp-head-parallel-size 8", "4 heads"], "--cp-strategy usp --cp-head-parallel-size 4"),
    ("--cp-strategy ulysses --context-parallel-size 3 --seq-length 96", 3,
     ["--cp-head-parallel-size 3", "4 heads"], "--cp-strategy ring --cp-head-parallel-size 1"),
    ("--cp-strategy usp --context-parallel-size 2", 2, ["--cp-strategy usp", "2 or more"], "--cp-head-parallel-size 2"),
    ("--context-parallel-size 4 --seq-length 132", 4,
     ["--seq-length 132", "zigzag", "multiple of 8"], "--seq-length 136"),
    ("--context-parallel-size 2 --seq-length 129 --cp-layout cyclic", 2,
     ["--seq-length 129", "cyclic", "of 2"], "--seq-length 130"),
    ("--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 132", 8,
     ["--seq-length 132", "multiple of 8"], "--seq-length 136"),
    ("--attention-dropout 0.1", 1, ["--attention-dropout 0.1", "no dropout"], "--attention-dropout 0"),
    # numbers
    ("--fp8-format hybrid --transformer-impl local --dry-run", 1, ["--fp8-format hybrid", "Transformer Engine"],
     "--transformer-impl transformer_engine"),
    pytest.param("--fp8-format hybrid", 1, ["--fp8-format hybrid", "it is not installed; leave it out"],
                 None, marks=without_te),
    ("--fp8-format hybrid --num-experts 4 --dry-run", 1, ["--fp8-format hybrid", "with experts; leave it out"], None),
    pytest.param("--transformer-impl transformer_engine", 1, ["--transformer-impl transformer_engine", "not installed"],
                 "--transformer-impl local", marks=without_te),
    # sharding over ranks
    ("--use-distributed-optimizer --num-distributed-optimizer-instances 3", 4,
     ["--num-distributed-optimizer-instances 3", "4 data x context ranks"], "--num-distributed-optimizer-instances 1"),
    ("--num-distributed-optimizer-instances 2", 4,
     ["--num-distributed-optimizer-instances 2", "sharded optimizer"], "--use-distributed-optimizer"),
    ("--data-parallel-sharding-strategy optim", 2,
     ["--data-parallel-sharding-strategy optim", "--use-megatron-fsdp"], "--use-megatron-fsdp"),
    ("--use-megatron-fsdp", 2, ["--use-megatron-fsdp", "fails without"],
     "--data-parallel-sharding-strategy optim_grads_params"),
    ("--use-megatron-fsdp", 1, ["--use-megatron-fsdp", "fails without"], "--data-parallel-sharding-strategy optim"),
    (f"{FSDP} optim_grads", 1, ["optim_grads", "more than once"], "--data-parallel-sharding-strategy optim"),
    (f"{FSDP} optim_grads_params --num-distributed-optimizer-instances 4", 4,
     ["--num-distributed-optimizer-instances 4", "more than once"], "--num-distributed-optimizer-instances 1"),
    (f"{FSDP} optim --num-distributed-optimizer-instances 2", 4,
     ["--num-distributed-optimizer-instances 2", "wrong gradients"], "--data-parallel-sharding-strategy optim_grads"),
    (f"{FSDP} optim --overlap-grad-reduce", 4,
     ["--overlap-grad-reduce", "wrong gradients with", "optim; leave it out"], None),
    (f"{FSDP} optim_grads_params --outer-dp-sharding-strategy optim", 4,
     ["--outer-dp-sharding-strategy optim", "norm"], "--outer-dp-sharding-strategy no_shard"),
    (f"{FSDP} optim_grads --tensor-model-parallel-size 2", 4,
     ["--tensor-model-parallel-size 2", "--use-torch-fsdp2"], "--tensor-model-parallel-size 1"),
    ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", 4,
     ["--use-torch-fsdp2", "pipeline"], "--pipeline-model-parallel-size 1"),
    ("--use-torch-fsdp2 --use-distributed-optimizer", 4,
     ["--use-torch-fsdp2", "--use-distributed-optimizer", "only one"], None),
    ("--use-torch-fsdp2 --rerun-mode validate_results", 4,
     ["--rerun-mode validate_results", "FSDP"], "--rerun-mode disabled"),
    (f"{FSDP} optim --fp16 --dry-run", 4, ["--fp16", "FSDP"], None),
    ("--rerun-mode report_stats", 1, ["--rerun-mode report_stats", "0.16.1"], "--rerun-mode validate_results"),
    ("--rerun-mode validate_results --no-check-for-nan-in-loss-and-grad", 1,
     ["--rerun-mode validate_results", "nothing to validate"], "--check-for-spiky-loss"),
    # pipelines and batches
    ("--num-layers 3 --pipeline-model-parallel-size 2", 2, ["--num-layers 3", "size 2"], "--num-layers 2"),
    ("--num-layers-per-virtual-pipeline-stage 1", 1,
     ["--num-layers-per-virtual-pipeline-stage 1", "--pipeline-model-parallel-size 2"], None),
    ("--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 2",
     2, ["--num-layers-per-virtual-pipeline-stage 4", "layers of a stage 6"],
     "--num-layers-per-virtual-pipeline-stage 2"),
    ("--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 3",
     2, ["--global-batch-size 3", "multiple of interleaved stages 2"], "--global-batch-size 2"),
    ("--global-batch-size 5 --micro-batch-size 2", 2, ["--global-batch-size 5", "= 4"], "--global-batch-size 4"),
    # schedule
    ("--min-lr 0.01", 1, ["--min-lr 0.01", "--lr 0.001"], "--min-lr 0.001"),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "after 10 iters"], "--lr-warmup-iters 1"),
    ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", 1, ["--lr-warmup-iters 2", "--lr-warmup-fraction"], None),
    ("--train-samples 100", 1, ["--train-iters 10", "--train-samples"], None),
    ("--lr-decay-samples 100", 1, ["--lr-decay-samples 100", "needs --train-samples"], None),
    ("--recompute-method block", 1, ["--recompute-method block", "needs --recompute-granularity full"], None),
    ("--window-attn-skip-freq 2", 1, ["--window-attn-skip-freq 2", "needs --window-size 4096,0; add"], None),
    ("--recompute-activations --recompute-granularity full", 1,
     ["--recompute-activations: cannot be combined with --recompute-granularity full"], None),
    ("--valid-data-path {folder}/data", 1, ["--valid-data-path", "--train-data-path PREFIX"], None),
    # precision and devices
    ("--bf16 --fp16", 1, ["--bf16", "--fp16", "only one"], None),
    pytest.param("--fp16", 1, ["--fp16", "GPU", "--bf16"], None, marks=without_gpu),
    pytest.param("--distributed-backend nccl", 1,
     ["--distributed-backend nccl", "GPUs"], "--distributed-backend gloo", marks=without_gpu),
    ("--loss-scale 8", 1, ["--loss-scale 8.0", "--fp16"], None),
    # combinations
    ("--overlap-param-gather", 1,
     ["--overlap-param-gather", "--use-distributed-optimizer"], "--use-distributed-optimizer --overlap-grad-reduce"),
    ("--recompute-granularity full", 1,
     ["--recompute-granularity full", "uniform"], "--recompute-method uniform --recompute-num-layers 1"),
    ("--recompute-num-layers 1", 1, ["--recompute-num-layers 1", "--recompute-granularity full"], None),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 3 --num-layers 4", 1,
     ["--recompute-num-layers 3", "does not divide the 4 layers"], "--recompute-num-layers 1"),
    ("--recompute-modules mlp", 1, ["--recompute-modules mlp", "selective"], "--recompute-granularity selective"),
    ("--recompute-modules mlp --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1,
     ["--recompute-modules mlp", "full computes whole layers again; leave it out"], None),
    ("--recompute-activations --recompute-modules moe", 1,
     ["--recompute-modules moe", "no experts"], "--recompute-modules mlp"),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --recompute-whitelist qkv fc1 "
     "--mlp-chunks-for-training 2", 1, ["--recompute-whitelist fc1", "--mlp-chunks-for-training 2"], None),
    ("--offload-checkpoints", 1, ["--offload-checkpoints", "needs --recompute-granularity full"], None),
    ("--optimizer-cpu-offload", 1, ["--optimizer-cpu-offload", "needs --use-precision-aware-optimizer --bf16"], None),
    pytest.param("--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload", 1,
     ["--optimizer-cpu-offload", "leave it and --use-precision-aware-optimizer out"], None, marks=without_gpu),
    pytest.param("--use-torch-fsdp2 --optimizer-cpu-offload", 1,
     ["--optimizer-cpu-offload", "GPU", "in host memory already"], None, marks=without_gpu),
    ("--dry-run --use-torch-fsdp2 --optimizer-cpu-offload --optimizer-offload-fraction 0.5", 1,
     ["--optimizer-offload-fraction 0.5", "--use-torch-fsdp2"], None),
    ("--dry-run --use-torch-fsdp2 --optimizer-cpu-offload --tensor-model-parallel-size 2", 2,
     ["--optimizer-cpu-offload", "tensor-parallel", "--tensor-model-parallel-size 1"], None),
    ("--fine-grained-activation-offloading --offload-modules core_attn", 1,
     ["--fine-grained-activation-offloading", "a GPU", "instead of it and --offload-modules give",
      "--offload-checkpoints --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"], None),
    ("--dry-run --transformer-impl transformer_engine --fine-grained-activation-offloading --offload-modules attn_proj",
     1, ["--offload-modules attn_proj", "give --offload-modules core_attn attn_proj"], None),
    ("--dry-run --transformer-impl transformer_engine --fine-grained-activation-offloading --offload-modules core_attn "
     "--recompute-activations", 1, ["--offload-modules core_attn", "give --recompute-modules mlp"], None),
    ("--dry-run --transformer-impl transformer_engine --fine-grained-activation-offloading --offload-modules core_attn "
     "--qk-layernorm", 1, ["--offload-modules core_attn", "--qk-layernorm"], None),
    ("--offload-kept", 1, ["--offload-kept", "needs --recompute-whitelist core_attention"], None),
    ("--save-interval 5", 1, ["--save-interval 5", "--save DIR"], None),
    ("--exit-on-missing-checkpoint", 1, ["--exit-on-missing-checkpoint", "--load DIR"], None),
    # data
    ("--data-path {folder}/nothing", 1, ["--data-path", "nothing.idx", "tools/preprocess_data.py"], None),
    ("--data-path {folder}/data.bin", 1, ["--data-path {folder}/data.bin"], "--data-path {folder}/data"),
    ("--data-path {folder}/only_index", 1, ["--data-path", "only_index.bin", "tools/preprocess_data.py"], None),
    ("--data-path {folder}/cut_index", 1, ["cut_index.idx has 57 bytes", "62", "preprocess_data.py"], None),
    ("--data-path {folder}/short_index", 1, ["short_index.idx is not an index", "preprocess_data.py"], None),
    ("--data-path {folder}/garbage", 1, ["garbage.idx is not an index", "preprocess_data.py"], None),
    ("--data-path {folder}/version", 1, ["version.idx has version 7", "preprocess_data.py"], None),
    ("--data-path {folder}/cut_data", 1, ["cut_data.bin has 1960 bytes", "2000", "preprocess_data.py"], None),
    ("--data-path {folder}/bad_description", 1, ["bad_description.json does not describe", "preprocess_data.py"], None),
    ("--data-path 0.5 {folder}/data 0.5", 1, ["--data-path 0.5", "weight", "0.7 FIRST 0.3 SECOND"], None),
    ("--data-path 0 {folder}/data", 1, ["--data-path 0", "weight"], None),
    ("--train-data-path {folder}/data", 1, ["--train-data-path", "--data-path"], None),
    ("--split 90;10", 1, ["--split 90;10", "969,30,1"], "--split 969,30,1"),
    ("--split 0,1,0", 1, ["--split 0,1,0", "the first above 0", "969,30,1"], "--split 969,30,1"),
    # tokenizer
    ("--tokenizer-type Bytes", 1,
     ["--tokenizer-type Bytes", "ByteLevelTokenizer"], "--tokenizer-type ByteLevelTokenizer"),
    ("--tokenizer-type SentencePieceTokenizer --tokenizer-model {folder}/no.model", 1,
     ["--tokenizer-model {folder}/no.model", "SentencePieceTokenizer", "tokenizer.model"], None),
    ("--tokenizer-type NullTokenizer", 1, ["--vocab-size: missing", "32000"], "--vocab-size 32000"),
    ("--vocab-size 100", 1, ["--vocab-size 100", "257"], "--vocab-size 257"),
    ("--data-path {folder}/other_tokenizer", 1,
     ["--tokenizer-type ByteLevelTokenizer", "give --tokenizer-type SentencePieceTokenizer"], None),
    ("--data-path {folder}/other_vocabulary", 1,
     ["--tokenizer-type ByteLevelTokenizer", "257 tokens", "other_vocabulary.json names a tokenizer with 300"], None),
    ("--data-path {folder}/large_ids", 1, ["--tokenizer-type ByteLevelTokenizer", "token 320 at index 4", "257"], None),
    ("--data-path {folder}/large_ids --tokenizer-type NullTokenizer --vocab-size 99", 1,
     ["--vocab-size 99", "has 100"], "--vocab-size 40001"),
    # checkpoints
    ("--load {folder}/deeper", 1, ["--num-layers 2", "{folder}/deeper", "with 7"], "--num-layers 7"),
    ("--load {folder}/gelu", 1, ["--swiglu: given", "{folder}/gelu", "leave out --swiglu"], None),
    ("--load {folder}/biased", 1, ["--disable-bias-linear: given", "leave out --disable-bias-linear"], None),
    ("--load {folder}/longer --position-embedding-type learned_absolute", 1,
     ["--max-position-embeddings 128", "with 256"], "--max-position-embeddings 256"),
    ("--load {folder}/old_optimizer", 1, ["--load", "another optimizer format"], "--no-load-optim"),
    ("--load {folder}/unreadable", 1, ["--load {folder}/unreadable", "'soon'", "100"], None),
    ("--load {folder}/incomplete", 1, ["--load {folder}/incomplete", "iter_0000009 is missing"], "--ckpt-step 3"),
    ("--load {folder}/trained --ckpt-step 2", 1, ["iter_0000002 is missing", "or --load-fallback"], "--ckpt-step 3"),
    ("--load {folder}/windowed", 1, ["--window-size: not given, but", "with 64,0", "--finetune"], "--window-size 64,0"),
    ("--load {folder}/windowed --window-size 32,0", 1, ["--window-size 32,0"], "--window-size 64,0"),
    ("--load {folder}/documents", 1, ["--reset-attention-mask: not given", "with it; give"], None),
    ("--load {folder}/other_seed", 1, ["--seed 1234", "{folder}/other_seed", "with 7"], "--seed 7"),
    ("--load {folder}/other_seed --seed 8", 1, ["--seed 8", "--override-data-order"], "--override-data-order"),
    ("--load {folder}/other_data", 1, ["{folder}/data: the checkpoint", "with elsewhere"], "--override-data-order"),
    ("--load {folder}/long_sequences", 1, ["--seq-length 128", "with 256"], "--seq-length 256"),
    ("--finetune --load {folder}/finetuned --save {folder}/finetuned/", 1,
     ["--finetune: --load {folder}/finetuned and --save are", "leave it out to resume"], None),
    ("--ckpt-step 3", 1, ["--ckpt-step 3", "--load DIR"], None),
    ("--keep-last 2", 1, ["--keep-last 2", "--save DIR"], None),
    ("--load {folder}/empty --exit-on-missing-checkpoint", 1,
     ["--load {folder}/empty", "latest_checkpointed"], None),
    ("--save {folder}/file/run", 1, ["--save {folder}/file/run", "is not writable", "--save runs/first"], None),
]
# fmt: on


@pytest.mark.parametrize(("flags", "world", "parts", "advice"), MISTAKES)
def test_a_mistake_is_one_line_and_its_advice_works(flags, world, parts, advice, folder, monkeypatch, capsys):
    def argv(flags):
        return f"{RUN} {flags}".format(data=folder / "data", folder=folder).split()

    def parse(argv):
        parse_args(argv)
        pytest.fail("accepted")

    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(arguments, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *argv(flags)])
    with pytest.raises(SystemExit) as leaving:
        programs.pretrain()
    err = capsys.readouterr().err
    _check_one_line(leaving.value.code, err, [part.format(folder=folder) for part in parts])
    if advice:
        advice = advice.format(folder=folder)
        assert all(word in err for word in advice.split())
        flags = re.sub(rf"{advice.split()[0]}[ =]\S+", "", flags)
        parse_args(argv(f"{flags} {advice}"))


def _check_one_line(code: int, err: str, parts: list[str]) -> None:
    assert code == 2
    assert re.fullmatch(r"pretrain_gpt\.py: error: [^\n]{10,400}\n", err), err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("missing", ["--micro-batch-size", "--train-iters", "--lr", "--data-path", "--preset"])
def test_what_training_needs_is_asked_for(missing, folder, monkeypatch, capsys):
    words = RUN.format(data=folder / "data").split()
    at = words.index(missing)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words[:at], *words[at + 2 :]])
    with pytest.raises(SystemExit) as leaving:
        programs.pretrain()
    sizes = ["--num-layers 24", "--hidden-size 1024", "--num-attention-heads 16", "--seq-length 2048"]
    named = sizes if missing == "--preset" else [missing]
    lines = capsys.readouterr().err.splitlines(keepends=True)
    for line, flag in zip(lines, named, strict=True):
        _check_one_line(leaving.value.code, line, [flag, "missing"])


def test_a_right_checkpoint_is_accepted(folder):
    args = parse_args(
        f"{RUN} --load {folder}/trained --exit-on-missing-checkpoint".format(data=folder / "data").split()
    )
    assert args.load == f"{folder}/trained"


def test_other_ranks_let_rank_0_speak_first(folder, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(run.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *RUN.format(data=folder / "none").split()])
    with pytest.raises(SystemExit) as leaving:
        programs.pretrain()
    assert waited == [30]
    _check_one_line(leaving.value.code, capsys.readouterr().err, ["rank 1: --data-path", "none.idx"])


def test_the_program_itself(folder):
    words = f"{RUN} --context-parallel-size 3".format(data=folder / "data").split()
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    program = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=environment)
    _check_one_line(done.returncode, done.stderr, ["--context-parallel-size 3", "start 3 ranks"])
    assert done.stdout == ""
