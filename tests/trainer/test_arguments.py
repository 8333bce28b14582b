"""Flags, files of flags, presets, derived values, the parameter count and the output of --dry-run."""

import math
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.cluster.step.memory import moments
from megatron.context_parallel.cluster.step.moment import OUTPUT
from megatron.context_parallel.commands.plan import read_flags as plan_flags
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.libraries import LIBRARIES
from megatron.context_parallel.kernels.names import BACKENDS
from megatron.context_parallel.trainer import dry_run, setup
from megatron.context_parallel.trainer.arguments import check_values
from megatron.context_parallel.trainer.arguments.command_line import PARSER, read_flags
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.arguments.preset_model import preset_model
from megatron.context_parallel.trainer.config.flags import FLAGS, PRESETS
from megatron.context_parallel.trainer.config.samples import decay_samples, train_samples, warmup_samples
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from megatron.context_parallel.trainer.data.tokenizer import build_tokenizer, vocabulary

ROOT = Path(__file__).parents[2]


def parsed(flags: str, world: int | None = None, monkeypatch=None):
    if world:
        monkeypatch.setenv("WORLD_SIZE", str(world))
    return parse_args(f"--micro-batch-size 1 --dry-run --save runs/x {flags}".split())


# ------------------------------------------------------------------------------------------------- defaults

# Megatron-LM's own defaults, as its users know them.
MEGATRON_DEFAULTS = {
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "swiglu": False,
    "add_bias_linear": True,
    "make_vocab_size_divisible_by": 128,
    "init_method_std": 0.02,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "seed": 1234,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 0,
    "min_lr": 0.0,
    "initial_loss_scale": 2**32,
    "hysteresis": 2,
    "distributed_timeout_minutes": 10,
    "eval_iters": 100,
    "eval_interval": 1000,
    "log_interval": 100,
    "num_workers": 2,
    "use_distributed_optimizer": False,
    "finetune": False,
}


def test_defaults_are_megatrons():
    args = read_flags([])
    assert {name: getattr(args, name) for name in MEGATRON_DEFAULTS} == MEGATRON_DEFAULTS
    assert args.attention_dropout == args.hidden_dropout == 0.0


def test_help_shows_groups_and_defaults():
    text = PARSER.help("all")
    for part in (
        "context parallel:",
        "learning rate:",
        "--cp-strategy SPEC",
        "(default: 1e-05)",
        "Megatron's default is 0.1",
    ):
        assert part in text
    assert "None)" not in text
    short, model = PARSER.help(""), PARSER.help("model")
    assert all(flag.option in text for flag in FLAGS.values())
    assert {name for name, flag in FLAGS.items() if f"  {flag.option}" in short} == {*PARSER.most_used}
    assert "--rotary-base N" in model and "  --lr X" not in model
    for section in PARSER.declared.sections:
        assert f"  {section.title.replace(' ', '-')} " in short and section.__doc__ in short
    with pytest.raises(UsageError, match=r"^--help modle: unknown; choose all or run or model or "):
        PARSER.help("modle")


def test_examples_of_help_are_command_lines_that_run(monkeypatch):
    for words in PARSER.examples:
        parsed(f"{words} --dry-run", world=2, monkeypatch=monkeypatch)


def test_every_value_that_an_error_recommends_works():
    for name, flag in FLAGS.items():
        if name != "config":
            assert getattr(read_flags(flag.works.split()), name) is not None, name


def test_bounds_are_those_in_the_words():
    for name, inside, outside in (
        ("num_layers", 1, 0),
        ("lr", 1e9, 0.0),
        ("lr", 1e-9, math.inf),
        ("min_lr", 0.0, -1.0),
    ):
        assert [FLAGS[name].fits(value) for value in (inside, outside, math.nan)] == [True, False, False]
    assert FLAGS["rotary_percent"].fits(1.0) and not FLAGS["adam_beta1"].fits(1.0)
    assert FLAGS["hidden_size"].bounds == "1 or more"
    assert FLAGS["num_layers"].bounds == "1 or more, 10000 at most"
    assert FLAGS["adam_beta1"].bounds == "0 or more, below 1"
    assert FLAGS["rotary_percent"].bounds == "above 0, 1 at most"


def test_unknown_flags_are_told_at_once_and_none_is_taken_for_one_of_another_kind():
    with pytest.raises(UsageError) as refusal:
        parsed("ring --num-layer=4 --vocab-dir a.json --tensor-parallel-size 2")
    assert str(refusal.value) == (
        "--save: followed by ring, which is neither flag nor value; give --save DIR; "
        "--num-layer: unknown flag (did you mean --num-layers?); --vocab-dir: unknown flag; "
        "--tensor-parallel-size: unknown flag (did you mean --tensor-model-parallel-size?); "
        "--help all lists the flags, such as --num-layers"
    )


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--no-cp-overlap=3", "--cp-overlap: ignored explicit argument '3'; give --cp-overlap"),
        ("--cp-overlap=3", "--cp-overlap: ignored explicit argument '3'; give --cp-overlap"),
        ("--bf16=1 --lr", "--bf16: ignored explicit argument '1'; give --bf16\n--lr: expected one argument; give --lr"),
    ],
)
def test_values_that_argparse_refuses_are_told_by_each_name_of_a_flag(words, refusal):
    with pytest.raises(UsageError) as told:
        parsed(words)
    assert str(told.value).startswith(refusal)


# From Python 3.13 on, -hx is -h.
@pytest.mark.parametrize("words", ["--help=x", *(["-hx"] if sys.version_info < (3, 13) else [])])
def test_a_value_of_help_is_refused(words):
    with pytest.raises(UsageError, match="-h: ignored explicit argument 'x'"):
        plan_flags(["ring", words])


SMALL = "--num-layers 4 --hidden-size 96 --num-attention-heads 6 --seq-length 64"


def test_derived_values(monkeypatch):
    args = parsed(
        f"{SMALL} --swiglu --bf16 --tensor-model-parallel-size 2 --context-parallel-size 2 --train-iters 5",
        world=12,
        monkeypatch=monkeypatch,
    )
    assert (args.world_size, args.rank, args.data_parallel_size) == (12, 0, 3)
    assert args.kv_channels == 16
    assert args.ffn_hidden_size == 256
    assert args.num_query_groups == 6
    assert args.max_position_embeddings == 64
    assert args.global_batch_size == 3
    assert args.cp_layout == "zigzag"
    assert args.params_dtype is torch.bfloat16
    assert (args.vocab_size, args.padded_vocab_size) == (257, 512)
    assert args.virtual_pipeline_model_parallel_size is None
    assert args.tensorboard_dir == "runs/x/tensorboard"


def test_ffn_without_swiglu_is_four_times_the_width():
    assert parsed(SMALL).ffn_hidden_size == 384


def test_query_groups():
    assert parsed(f"{SMALL} --group-query-attention").num_query_groups == 1
    assert parsed(f"{SMALL} --group-query-attention --num-query-groups 3").num_query_groups == 3
    with pytest.raises(UsageError, match="--num-query-groups 3: needs --group-query-attention"):
        parsed(f"{SMALL} --num-query-groups 3")


def test_virtual_stages(monkeypatch):
    flags = f"{SMALL} --pipeline-model-parallel-size 2 --global-batch-size 2 --num-layers-per-virtual-pipeline-stage"
    assert parsed(f"{flags} 1", 2, monkeypatch).virtual_pipeline_model_parallel_size == 2
    assert parsed(f"{flags} 2", 2, monkeypatch).virtual_pipeline_model_parallel_size is None


def test_data_parallel_ranks_share_documents(monkeypatch):
    flags = "--preset tiny-llama --context-parallel-size 2 --dynamic-context-parallel --reset-attention-mask"
    flags += " --tokenizer-type HuggingFaceTokenizer --tokenizer-model examples --seq-length 64 --global-batch-size 16"
    monkeypatch.setattr("megatron.context_parallel.trainer.arguments.complete.vocabulary", lambda flags: (500, 3))
    for more, sequences in (("", 4), ("--max-seqlen-per-dp-cp-rank 16", 2), ("--max-seqlen-per-dp-cp-rank 64", 8)):
        args = parsed(f"{flags} {more}", 8, monkeypatch)
        sizes = args.context_parallel_size, args.data_parallel_size, args.micro_batch_size, args.cp_place_documents
        assert sizes == (8, 1, sequences, True)
    with pytest.raises(UsageError) as error:
        parsed(f"{flags} --max-seqlen-per-dp-cp-rank 4 --save-interval 5", 8, monkeypatch)
    assert "8 ranks have no whole sequences of --seq-length 64; give --max-seqlen-per-dp-cp-rank 8" in str(error.value)


def test_sample_counts_become_iterations():
    samples = "--global-batch-size 8 --train-samples 803 --lr-decay-samples 641 --lr-warmup-samples 81 --lr 1"
    args = parsed(f"{SMALL} {samples}")
    assert (args.train_iters, train_samples(args), decay_samples(args), warmup_samples(args)) == (100, 803, 641, 81)
    args = parsed(f"{SMALL} --global-batch-size 8 --train-iters 100 --lr-warmup-fraction 0.1 --lr 1")
    assert (args.train_iters, train_samples(args), decay_samples(args), warmup_samples(args)) == (100, 800, 800, 80)
    with pytest.raises(UsageError, match=r"--lr-warmup-samples 90: .* after 80 samples; give --lr-warmup-samples 8$"):
        parsed(f"{SMALL} --global-batch-size 8 --train-samples 80 --lr-warmup-samples 90")


@pytest.mark.parametrize(("rampup", "first"), [("", 8), ("--rampup-batch-size 4 4 100", 4)])
def test_fewer_samples_than_an_update_are_refused(rampup, first):
    run = f"{SMALL} --global-batch-size 8 {rampup} --train-samples"
    assert parsed(f"{run} {first}").train_iters == 1
    with pytest.raises(UsageError, match=f"fewer than the {first} .* of an update; give --train-samples {first}$"):
        parsed(f"{run} {first - 1}")


def test_a_ramp_up_to_an_odd_batch_recommends_one_that_works():
    run = f"{SMALL} --micro-batch-size 3 --train-samples 80 --rampup-batch-size 3 3 9 --global-batch-size"
    with pytest.raises(UsageError, match=r"^--global-batch-size 8: .* multiple of 3, .*; give --global-batch-size 6$"):
        parsed(f"{run} 8")
    assert parsed(f"{run} 6").global_batch_size == 6


def test_null_tokenizer_has_one_token_more_than_its_vocabulary():
    args = parsed(f"{SMALL} --tokenizer-type NullTokenizer --vocab-size 128 --make-vocab-size-divisible-by 1")
    assert (args.vocab_size, args.padded_vocab_size) == (128, 129)


# ---------------------------------------------------------------------------------------------------- files


def test_flags_win_over_config_and_config_over_preset(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "preset: tiny-llama\nnum_layers: 6\nhidden-size: 32\nswiglu: false\nbf16: true\n"
        "lr: 1e-3\nlr_warmup_iters: null\ntrain-data-path: [a, b]\n"
    )
    given = ["--config", str(config), "--hidden-size", "48", "--lr=2e-3", "--micro-batch-size", "1", "--dry-run"]
    with pytest.raises(UsageError, match=r"^--train-data-path a: there is no a\.idx"):
        parse_args(given)
    config.write_text(config.read_text().replace("train-data-path: [a, b]\n", ""))
    args = parse_args(given)
    assert (args.num_layers, args.hidden_size, args.lr) == (6, 48, 2e-3)
    assert (args.swiglu, args.bf16, args.lr_warmup_iters) == (False, True, 0)
    assert (args.normalization, args.num_query_groups) == ("RMSNorm", 2)


def test_preset_on_the_command_line_wins_over_the_one_in_the_config(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("preset: llama3-8b\n")
    assert parsed(f"--config {config} --preset tiny-gpt3").num_layers == 2


# -------------------------------------------------------------------------------------------------- presets

# Published sizes: GPT-3 by name; Llamas by their model cards, vocabularies without padding.
PUBLISHED = {
    "gpt3-760m": (760e6, 0.02),
    "gpt3-2.7b": (2.7e9, 0.02),
    "gpt3-13b": (13e9, 0.02),
    "gpt3-66b": (66e9, 0.02),
    "gpt3-175b": (175e9, 0.02),
    "llama-7b": (6_738_415_616, 0),
    "llama-gqa": (6_738_415_616 - 32 * 2 * 4096 * 3072, 0),
    "llama-33h": (32 * (4 * 4224**2 + 3 * 4224 * 11008 + 2 * 4224) + 4224 * (2 * 32000 + 1), 0),
    "llama-16h": (64 * (4 * 2048**2 + 3 * 2048 * 11008 + 2 * 2048) + 2048 * (2 * 32000 + 1), 0),
    "llama-8h": (4.94e9, 0.01),
    "llama-4h": (4.62e9, 0.01),
    "llama-2h": (4.48e9, 0.01),
    "llama2-7b": (6_738_415_616, 0),
    "llama2-7b-gqa": (6_738_415_616 - 32 * 2 * 4096 * 3072, 0),
    "llama3-8b": (8_030_261_248, 0),
    "llama3-405b": (405_853_388_800, 0),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_preset_has_its_published_size(preset):
    size, tolerance = PUBLISHED[preset]
    args = parsed(f"--preset {preset}")
    model = model_of(args)
    assert abs(model.parameters - size) <= tolerance * size
    assert preset_model(preset, args.seq_length) == model


def test_every_preset_is_accepted():
    assert set(PUBLISHED) <= set(PRESETS)
    for preset in PRESETS:
        assert parsed(f"--preset {preset}").num_layers > 0


# --------------------------------------------------------------------------------------------- real models


def _real_parameters(flags: str) -> int:
    """Parameters of this rank's model, counted on megatron-core's own."""
    from megatron.core import parallel_state

    from megatron.context_parallel import ContextParallel
    from megatron.context_parallel.trainer import setup
    from megatron.context_parallel.trainer.model import build as model

    args = parse_args(flags.split())
    setup.initialize_model_parallel(args)
    try:
        gpt = model.build_gpt(
            args, model.transformer_config(args), ContextParallel(group=parallel_state.get_context_parallel_group())
        )
        return sum(parameter.numel() for parameter in gpt.parameters())
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    "more",
    [
        "--preset tiny-llama",
        "--preset tiny-gpt3",
        "--preset tiny-llama --add-qkv-bias",
        "--preset tiny-llama --qk-layernorm --softmax-type learnable",
        "--preset tiny-gpt3 --disable-bias-linear",
    ],
)
def test_count_is_that_of_the_real_model(ranks, more):
    flags = f"--micro-batch-size 1 --dry-run {more}"
    assert ranks(1, _real_parameters, flags) == [model_of(parse_args(flags.split())).parameters]


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gpt3"])
def test_count_per_rank_is_that_of_the_real_stages(ranks, preset):
    flags = f"--preset {preset} --micro-batch-size 1 --dry-run --tensor-model-parallel-size 2"
    flags += " --pipeline-model-parallel-size 2"
    args = parse_args(flags.split())
    stages = [model_of(args).parameters_on_stage(stage, 2, 2) for stage in (0, 1)]
    assert ranks(4, _real_parameters, flags) == [stages[0], stages[0], stages[1], stages[1]]


# ------------------------------------------------------------------------------------------------- dry run


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_on_gpus_is_planned_on_a_host_without_one(backend):
    flags = f"{SMALL} --kv-channels 64 --fp16 --distributed-backend nccl --context-parallel-size 4"
    args = parsed(f"{flags} --seq-length 1024 --cp-attention-backend {backend}")
    assert (args.params_dtype, args.distributed_backend) == (torch.float16, "nccl")


@pytest.mark.parametrize(
    "more,rows",
    [
        ("--cp-layout cyclic", "1023 rows by 1023 keys, causal"),
        ("--seq-length 1000", "250 rows by 250 keys, causal"),
        ("--cp-strategy mesh --cp-layout cyclic", "1023 rows by 1023 keys, causal"),
    ],
)
def test_blocks_that_a_library_does_not_compute_are_refused_before_the_start(more, rows):
    flags = f"{SMALL} --kv-channels 64 --bf16 --context-parallel-size 4 --seq-length 4096"
    parsed(f"{flags} {more} --cp-attention-backend flash2")
    parsed(f"{flags} {more} --cp-attention-backend auto")
    message = f"--cp-attention-backend cudnn: .*128 rows, not {rows}; give --cp-attention-backend triton"
    with pytest.raises(UsageError, match=message) as error:
        parsed(f"{flags} {more} --cp-attention-backend cudnn")
    assert "\n" not in str(error.value)


NCCL = f"{SMALL} --context-parallel-size 4"


def test_options_of_nccl_reach_the_groups(tmp_path, monkeypatch):
    file, given = tmp_path / "nccl.yaml", {}
    file.write_text("cp: {max_ctas: 16}")
    flags = f"--high-priority-stream-groups cp tp --nccl-communicator-config-path {file}"
    args = parsed(f"{NCCL} --distributed-backend nccl {flags}")
    monkeypatch.setattr(setup, "seed_all", lambda seed: None)
    monkeypatch.setattr(setup.parallel_state, "initialize_model_parallel", lambda **how: given.update(how))
    setup.initialize_model_parallel(args)
    assert given["high_priority_stream_groups"] == ["cp", "tp"]
    assert given["nccl_communicator_config_path"] == str(file)


@pytest.mark.parametrize(
    "text,message",
    [
        ("ring: {max_ctas: 16}", "ring is not a supported NCCL group; use one of cp, dp_cp, pp, tp"),
        ("cp: {most: 16}", "most is not a supported NCCL option; use one of cga_cluster_size, .* max_ctas"),
        ("cp: 16", "must map groups to options"),
        ("cp: {", "cannot be read"),
    ],
)
def test_options_of_nccl_that_nobody_reads_are_refused(text, message, tmp_path):
    file = tmp_path / "nccl.yaml"
    file.write_text(text)
    flags = f"{NCCL} --nccl-communicator-config-path {file}"
    with pytest.raises(UsageError, match=f"nccl.yaml: .*{message}") as error:
        parsed(f"{flags} --distributed-backend nccl")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="has an effect only with NCCL, between GPUs; leave it out"):
        parsed(f"{flags} --distributed-backend gloo")


def test_gloo_is_refused_between_gpus(monkeypatch):
    args = replace(
        parsed(f"{SMALL} --context-parallel-size 2 --distributed-backend gloo", 2, monkeypatch), dry_run=False
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="gloo: does not send tensors of GPUs; give --distributed-backend nccl"):
        raise next(check_values._check_devices(args))


def test_the_attention_backends_are_those_that_can_be_chosen():
    assert ("auto", *LIBRARIES, "triton") == BACKENDS


def test_the_vocabulary_is_that_of_the_tokenizer():
    for kind in ("ByteLevelTokenizer", "NullTokenizer"):
        given = Namespace(tokenizer_type=kind, tokenizer_model=None, vocab_size=99)
        built = build_tokenizer(given)
        assert vocabulary(given) == (built.vocab_size, built.eod)


def test_groups_of_the_dry_run(monkeypatch):
    flags = f"{SMALL} --tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2"
    found = dry_run.groups(parsed(flags, 16, monkeypatch))
    assert found["tensor"][:2] == [(0, 1), (2, 3)]
    assert found["context"][:3] == [(0, 2), (1, 3), (4, 6)]
    assert found["data"][:2] == [(0, 4), (1, 5)]
    assert found["pipeline"][7] == (7, 15)
    for groups in found.values():
        assert sorted(rank for group in groups for rank in group) == list(range(16))


def _groups_of_megatron(flags: str) -> dict[str, list[int]]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron.context_parallel.trainer import setup

    setup.initialize_model_parallel(parse_args(flags.split()))
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
    }
    try:
        return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    "sizes",
    [
        "--context-parallel-size 2",
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
        "--context-parallel-size 2 --pipeline-model-parallel-size 2",
    ],
)
def test_groups_are_those_megatron_makes(ranks, monkeypatch, sizes):
    flags = f"{SMALL} --micro-batch-size 1 --dry-run {sizes}"
    shown = dry_run.groups(parsed(f"{SMALL} {sizes}", 4, monkeypatch))
    for rank, real in enumerate(ranks(4, _groups_of_megatron, flags)):
        for name, members in real.items():
            assert next(group for group in shown[name] if rank in group) == tuple(members)


def test_attention_traffic_is_that_of_the_table(monkeypatch):
    flags = f"{SMALL} --context-parallel-size 4 --bf16"
    unit = 16 * 96 * 2  # tokens per rank x width x bytes
    args = parsed(flags)
    assert dry_run.attention_bytes(args, backward=False) == 2 * 3 * unit
    grouped = parsed(f"{flags} --group-query-attention --num-query-groups 3 --cp-strategy allgather")
    assert dry_run.attention_bytes(grouped, backward=False) == 3 * unit
    # Backward: keys and values again in bf16, their gradients in float32.
    assert dry_run.attention_bytes(grouped, backward=True) == 3 * unit + 2 * 3 * unit
    narrow = parsed(f"{flags} --cp-strategy allgather --cp-partials-in-16-bits")
    assert dry_run.attention_bytes(narrow, backward=True) == 2 * 3 * unit + 2 * 3 * unit
    for where in ("--cp-partials-in-16-bits", "--cp-strategy ring:partials_in_16_bits=yes", "--cp-strategy auto"):
        wide = f"{SMALL} --context-parallel-size 4 {where}" + " --cp-partials-in-16-bits" * where.endswith("auto")
        with pytest.raises(UsageError, match="--cp-partials-in-16-bits: the model is float32; give --bf16, or leave"):
            parsed(wide)
    many = f"{SMALL} --context-parallel-size 128 --cp-strategy ring:layout=contiguous --window-size 2,0"
    args = parsed(many.replace("--seq-length 64", "--seq-length 1024"), 128, monkeypatch)
    assert dry_run.attention_bytes(args, backward=False) == 2 * 2 * 96 * 4  # 2 of the 8 keys of the rank before


def test_memory_adds_up_by_hand():
    args = parsed(f"{SMALL} --context-parallel-size 2 --bf16 --use-distributed-optimizer --global-batch-size 2")
    (head, *_) = moments(model_of(args), run_of(args))
    sizes = {item.what: item.bytes for item in head.items}
    count = model_of(args).parameters
    assert sizes["weights"] == 2 * count
    assert sizes["gradients"] == 4 * count
    assert sizes["optimizer"] == 12 * count // 2
    norm, attention, mlp = 96 + 2, 96 + 4 * 96, 96 + 2 * 384  # numbers of a token; LayerNorm on a CPU
    assert sizes["attention activations"] == 32 * 4 * ((norm + attention) * 2 + 6 * 4)
    assert sizes["MLP activations"] == 32 * 4 * (norm + mlp) * 2
    assert (head.name, sizes["logits and loss"]) == (
        OUTPUT,
        32 * ((norm + 96) * 2 + 13) + 384 * (32 + 96) * 2 + 32 * 96 * 2,
    )


def test_recompute_keeps_one_input_per_layer():
    flags = f"{SMALL} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    args = parsed(flags)
    _, mlp, *_ = moments(model_of(args), run_of(args))
    sizes = {item.what: item.bytes for item in mlp.items}
    assert sizes["recomputed layers"] == 64 * 4 * 96 * 4 + (2 * 4 + 3) * 5056
    norm = 96 + 2
    assert sizes["attention activations"] == 64 * (norm + 96 + 4 * 96 + 6) * 4
    assert sizes["MLP activations"] == 64 * (norm + 96 + 2 * 384) * 4


# ----------------------------------------------------------------------------------------- strategy options


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--cp-strategy ring", {}),
        ("--cp-strategy attention2d --cp-grid 1x4 --no-cp-overlap", {"grid": (1, 4), "overlap": False}),
        ("--cp-strategy lightseq --no-cp-balance --cp-prefetch", {"balance": False, "prefetch": True}),
        (
            "--cp-strategy loongtrain --cp-head-parallel-size 2 --cp-inner-ring-size 2 --cp-placement context-first",
            {"head_parallel_size": 2, "inner_ring_size": 2, "placement": "context-first"},
        ),
        ("--cp-strategy mesh --cp-grid 2x2", {"grid": (2, 2)}),
        ("--cp-strategy mesh --cp-q-cost 2", {"q_transfer_blocks": 2.0}),
    ],
)
def test_strategy_flags_reach_the_strategy(flags, options):
    choice = parsed(f"{SMALL} --context-parallel-size 4 {flags}").cp_layers[0]
    assert choice.strategy is STRATEGIES[flags.split()[1]]
    assert {**choice.common, **choice.options} == options


def test_strategy_flags_in_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    for options, values in (("cp-overlap: false", {"overlap": False}), ("cp_q_cost: 2", {"q_transfer_blocks": 2.0})):
        name = "attention2d" if "overlap" in options else "mesh"
        file.write_text(f"cp-strategy: {name}\n{options}\ncontext-parallel-size: 4\n")
        assert parsed(f"{SMALL} --config {file}").cp_layers[0].options == values


def test_a_strategy_of_ones_own_that_fails_is_one_line(tmp_path):
    (tmp_path / "own.py").write_text(
        "from megatron.context_parallel.strategies import register\n\n\n"
        "@register('failing', layouts=('contiguous',))\ndef failing(at):\n    yield at.nothing\n"
    )
    with patch.dict(STRATEGIES), pytest.raises(UsageError) as refused:
        parsed(f"{SMALL} --context-parallel-size 4 --cp-strategy {tmp_path}/own.py:failing")
    why = "own.py:failing: failed to make a plan for 4 ranks: AttributeError: 'Pass' object has no attribute 'nothing'"
    assert f"{why} (own.py, line 6)" in str(refused.value)


def test_a_word_with_a_line_break_is_refused_in_one_line():
    with pytest.raises(UsageError) as refused:
        parse_args(["--num-layers\n", "2"])
    assert str(refused.value).startswith(r"--num-layers\n: unknown flag")
