"""Flags of Megatron-LM: of its launch scripts, without effect, refused, and those that work as there."""

import importlib.util
import re
from pathlib import Path

import pytest
from megatron.core import num_microbatches_calculator

from examples import train_tokenizer
from megatron.context_parallel import UsageError
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments.command_line import PARSER, read_flags
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.samples import batch_size, iterations
from megatron.context_parallel.trainer.config.upstream_flags import UPSTREAM, refused, without_effect
from tests.support import training_case
from tests.support.data_case import arguments, datasets

ROOT = Path(__file__).parents[2]
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --dry-run"

# The flags of Megatron-LM's scripts in examples/gpt3 and examples/llama (d98e8a6), each with a value.
GPT3 = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --step-batch-size-schedule 0:16
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file vocab.json --merge-file merges.txt
--split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save {tmp}/gpt3 --eval-iters 10
--tensorboard-dir {tmp}"""
LLAMA = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
--manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 --fp8-format hybrid --fp8-amax-history-len 1024
--fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 2 --context-parallel-size 1
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path {tmp} --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --save {tmp}/llama --load {tmp}/llama
--tensorboard-dir {tmp}"""
MIXTRAL = """--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
--tokenizer-model {tmp}/tokenizer.model --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4
--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
--lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000
--eval-interval 1000 --eval-iters 10 --save {tmp}/mixtral --load {tmp}/mixtral --tensorboard-dir {tmp}
--no-load-optim --no-load-rng"""
SCRIPTS = {"gpt3": GPT3, "llama": LLAMA, "mixtral": MIXTRAL}
REFUSED = {
    "gpt3": {"--step-batch-size-schedule", "--vocab-file", "--merge-file"},
    "llama": {"--grad-reduce-in-bf16", "--fp8-param-gather"},
    "mixtral": {"--no-position-embedding"},
}
# Others that Megatron's users type, each of which is accepted.
TYPED = """--use-mcore-models --transformer-impl local --bf16 --lr-warmup-iters 1 --eod-mask-loss --mock-data
--ckpt-format torch_dist --async-save --log-params-norm --log-timers-to-tensorboard --log-num-zeros-in-grad
--timing-log-level 0 --profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 0
--distributed-timeout-minutes 9 --data-cache-path {tmp} --no-gradient-accumulation-fusion --cross-entropy-loss-fusion
--manual-gc --manual-gc-interval 9 --tp-comm-overlap --attention-backend flash --optimizer adam --dataloader-type single
--override-opt_param-scheduler --check-for-nan-in-loss-and-grad --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --ckpt-fully-parallel-save --ckpt-fully-parallel-load
--skip-train --save {tmp}/x --train-iters 9 --lr 1"""


def words_by_flag(script: str) -> list[list[str]]:
    return [group.split() for group in re.split(r"\s(?=--)", script)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launch_script_of_megatron_runs_after_one_refusal_that_names_all(name, tmp_path, monkeypatch, capsys):
    flags = words_by_flag(SCRIPTS[name].format(tmp=tmp_path))
    (tmp_path / "some.txt").write_text("some text")
    train_tokenizer.train([f"{tmp_path}/some.txt"], tmp_path / "tokenizer.model")
    capsys.readouterr()
    monkeypatch.setenv("WORLD_SIZE", "128")
    with pytest.raises(UsageError) as refusal:
        parse_args([word for words in flags for word in words] + ["--dry-run"])
    assert {line.split()[0].strip(":") for line in refusal.value.args} == REFUSED[name]
    capsys.readouterr()
    args = parse_args([word for words in flags if words[0] not in REFUSED[name] for word in words] + ["--dry-run"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "these flags of Megatron-LM are accepted, but have no effect:"
    if name == "gpt3":
        assert (args.num_layers, args.train_iters, args.data_parallel_size) == (96, 500000, 1)
        assert said[1:] == ["  --attention-backend: --cp-attention-backend selects the library for attention"]
    elif name == "llama":
        assert (args.train_iters, args.split, args.decoupled_lr) == (1953125000 // 128, "99,1,0", 5e-4)
        assert (args.fp8_amax_history_len, args.transformer_impl) == (1024, "transformer_engine")
        assert "--fp8-format hybrid needs Transformer Engine to train" in said[-1]
    else:
        assert (args.num_experts, args.sequence_parallel) == (8, False)
        assert said[-1] == "warning: --sequence-parallel is off: --tensor-model-parallel-size is 1"


def test_what_users_type_is_accepted(tmp_path):
    args = parse_args(f"{SMALL} {TYPED.format(tmp=tmp_path)}".split())
    assert (args.mock_data, args.skip_train, args.bf16, args.async_save) == (True, True, True, True)


def test_the_table_has_no_flag_of_ours_and_advises_flags_that_there_are():
    assert not UPSTREAM.keys() & PARSER.by_option.keys()
    for flag in UPSTREAM.values():
        for named in re.findall(r"--[a-z][a-z0-9-]*", flag.says):
            assert named in PARSER.by_option, f"{flag.option}: {flag.says}"
        given = {flag.option: [flag.values[0] if flag.values else "x"] if flag.nargs else []}
        if flag.refused:
            assert [flag.says in str(error) for error in refused(given)] == [True] and not without_effect(given)
        else:
            assert without_effect(given)[1:] == [f"  {flag.option}: {flag.says}"] and not refused(given)


def test_values_of_megatron_that_are_not_here_are_refused(tmp_path):
    for flags, refusal in (
        ("--optimizer sgd", "--optimizer sgd: not supported; give --optimizer adam, or leave it out"),
        ("--recompute-modules moe_act", "--recompute-modules moe_act: unknown; choose core_attn or moe or mlp"),
        ("--dataloader-type", "--dataloader-type: expected 1 argument"),
        ("--use-mcore-model", "--use-mcore-model: unknown flag (did you mean --use-mcore-models?)"),
        ("--rl-profile-dir x", "--rl-profile-dir x: a flag of Megatron-LM that is not supported; leave it out"),
    ):
        with pytest.raises(UsageError, match=re.escape(refusal)):
            read_flags(flags.split())
    file = tmp_path / "run.yaml"
    file.write_text("use-mcore-models: true\nmanual-gc: false\noptimizer: sgd\n")
    with pytest.raises(UsageError, match="--optimizer sgd: not supported"):
        read_flags(["--config", str(file)])


def test_the_page_is_that_of_the_table():
    spec = importlib.util.spec_from_file_location("page", ROOT / "tools" / "upstream_flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python tools/upstream_flags.py"


# ------------------------------------------------------------------------------------------- as in Megatron-LM


def test_the_batch_grows_as_megatrons(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ramp = "--global-batch-size 20 --rampup-batch-size 8 4 100 --train-samples 250 --lr 1"
    args = parse_args(f"{SMALL} {ramp}".split())
    # Until megatron-core 0.17; later releases have --step-batch-size-schedule instead.
    theirs = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
    megatrons = theirs and theirs(20, 1, 2, False, 1, 8, 4, 100)
    consumed = sizes = 0
    while consumed < 250:
        if megatrons:
            megatrons.update(consumed, True)
            assert batch_size(args, consumed) == megatrons.current_running_global_batch_size, consumed
        consumed, sizes = consumed + batch_size(args, consumed), sizes + (consumed + batch_size(args, consumed) <= 250)
    assert args.train_iters == iterations(args) == sizes
    for wrong in ("8 4", "8 5 100", "24 4 100", "7 1 100"):
        with pytest.raises(
            UsageError, match=rf"--rampup-batch-size {wrong}: must be .*; give --rampup-batch-size 2 2 2000"
        ):
            parse_args(f"{SMALL} {ramp.replace('8 4 100', wrong)}".split())
    with pytest.raises(UsageError, match="--rampup-batch-size 8 4 100: needs --train-samples"):
        parse_args(f"{SMALL} --rampup-batch-size 8 4 100 --train-iters 9".split())


RAMP = {"rampup_batch_size": [2, 1, 6], "global_batch_size": 4, "train_samples": 20, "micro_batch_size": 1}


OTHER_BATCHES = [  # of a run that resumes in the ramp-up, and the error: the iterations so far had other batches
    ({"rampup_batch_size": None}, "no --rampup-batch-size: .* with --rampup-batch-size 2 1 6, .* give .* 2 1 6"),
    ({"rampup_batch_size": [2, 2, 6]}, "--rampup-batch-size 2 2 6: .*; give --rampup-batch-size 2 1 6"),
    ({"global_batch_size": 5}, "--global-batch-size 5: .*; give --global-batch-size 4"),
]


def ramp_up(directory: str) -> tuple[list[float], list[float], list[int]]:
    """Losses of a run and of one that stops and resumes in the ramp-up; the consumed samples by iteration."""
    consumed = []

    class Recorder(training_case.Recorder):
        def iteration_done(self, progress, *others) -> None:
            super().iteration_done(progress, *others)
            consumed.append(progress.consumed_train_samples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_case, "Recorder", Recorder)
        whole = training_case.train("llama", train_iters=6, **RAMP)
        first = training_case.train("llama", train_iters=6, exit_interval=2, save=directory, **RAMP)
        then = training_case.train("llama", train_iters=6, load=directory, **RAMP)
        for change, named in OTHER_BATCHES:
            with pytest.raises(UsageError, match=f"^{named}, or --train-iters$"):
                changed = RAMP | {"load": directory, "override_data_order": True} | change
                training_case.train("llama", train_iters=6, **changed)
    return whole.losses, first.losses + then.losses, consumed


def test_a_batch_that_grows_trains_on_every_sample_once(ranks, tmp_path):
    for whole, resumed, consumed in ranks(1, ramp_up, str(tmp_path)):
        assert consumed == [2, 4, 7, 11, 15, 19] * 2
        assert resumed == whole


def embedding_rates() -> list[tuple[int, float, float]]:
    args = training_case.case_args("llama", decoupled_lr=0.5, decoupled_min_lr=0.1)
    with training_case.groups(args):
        groups = training_case.build(args).optimizer.param_groups
        return sorted((len(group["params"]), group["max_lr"], group["min_lr"]) for group in groups)


def test_embedding_and_output_layer_have_their_own_rate(ranks):
    (rates,) = ranks(1, embedding_rates)
    assert [rate for rate in rates if rate[1:] != (1e-2, 1e-3)] == [(2, 0.5, 0.1)]


def test_mock_data_are_documents_of_rising_numbers(tmp_path):
    args = arguments(tmp_path, mock_data=True, split="99,1,0", data_cache_path=None)
    train, valid, test = datasets(args, 8, 2, 0)
    assert len(train) >= 8 and len(valid) >= 2 and test is None
    for sample in (train[0], train[7], valid[1]):
        steps = sample["labels"] - sample["tokens"]
        assert ((steps == 1) | (sample["tokens"] >= 255) | (sample["labels"] >= 255)).all()


def test_training_can_be_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup, "end_at_signals", lambda *given: None)  # signals end pytest
    words = f"{SMALL} --mock-data --eval-iters 2 --num-workers 0 --log-interval 1".replace("--dry-run", "").split()
    trained = [*words, "--train-iters", "2", "--eval-interval", "2", "--lr", "1e-3", "--save", str(tmp_path)]
    training.pretrain(parse_args(trained))
    there = re.search(r"validation at iteration 2 \| lm loss (\S+)", capsys.readouterr().out)[1]
    with pytest.raises(UsageError, match="has checkpoints of another run, the last of iteration 2; give --load"):
        parse_args(trained)
    training.pretrain(parse_args([*trained, "--load", str(tmp_path)]))
    said = capsys.readouterr().out
    assert "nothing to do: all iterations of --train-iters 2 are done" in said and "test at" not in said
    # A job that ended before its last evaluation makes that when it is started again.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))
    training.pretrain(parse_args([*trained, "--load", str(tmp_path)]))
    assert "test at iteration 2 | lm loss" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines)
    # The sizes of the model are those of the checkpoint.
    loaded = ["--use-checkpoint-args", "--load", str(tmp_path), "--mock-data", "--micro-batch-size", "1"]
    args = parse_args([*loaded, "--skip-train", "--eval-iters", "2", "--num-workers", "0"])
    assert (args.num_layers, args.hidden_size, args.seq_length, args.train_iters) == (2, 64, 64, 0)
    training.pretrain(args)
    said = capsys.readouterr().out
    assert f"validation at iteration 2 | lm loss {there}" in said and "test at iteration 2 | lm loss" in said
    assert "iteration        " not in said
    for nothing in ("--eval-iters 0: --skip-train leaves", "--split 9,0,0: --skip-train leaves nothing to do; give"):
        with pytest.raises(UsageError, match=nothing):
            parse_args([*loaded, "--skip-train", *nothing.partition(":")[0].split()])
    with pytest.raises(UsageError, match=r"--num-layers 3: the checkpoint in --load .* was saved with 2"):
        parse_args([*loaded, "--num-layers", "3", "--train-iters", "9", "--lr", "1"])
    with pytest.raises(UsageError, match="nowhere: contains neither checkpoints of a run"):
        parse_args([*loaded[:2], str(tmp_path / "nowhere")])
