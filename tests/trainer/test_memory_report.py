"""Whether a run fits a device, the flags that make it fit, and the answer of a rank that has no memory left."""

import re
import shlex
from dataclasses import replace

import pytest
import torch

from megatron.context_parallel import UsageError
from megatron.context_parallel.cluster.step import fit
from megatron.context_parallel.cluster.step.fit import advice, bytes_needed, changes_to_fit
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from megatron.context_parallel.trainer.dry_run import describe
from megatron.context_parallel.trainer.memory_report import explain_out_of_memory

LLAMA = "--preset llama3-8b --seq-length 65536 --micro-batch-size 1 --bf16 --dry-run --context-parallel-size 8"


def parsed(flags: str, monkeypatch, ranks: int = 8):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    return parse_args(shlex.split(flags))


def needed_with(changes: str, monkeypatch, ranks: int = 8) -> float:
    args = parsed(f"{LLAMA} --device-memory 80GB {changes}", monkeypatch, ranks)
    return bytes_needed(model_of(args), run_of(args)) / 2**30


@pytest.mark.parametrize("device", ["--device-memory 80GB", "--cp-cluster dgx-h100"])
def test_the_advice_makes_a_run_fit(device, monkeypatch, capsys):
    """The flags of the verdict, parsed again, need what it says."""
    describe(parsed(f"{LLAMA} {device}", monkeypatch))
    said = capsys.readouterr().out
    needed, flags, then = re.search(
        r"does not fit: (\d+) GiB of 75.2, 94% of 80; it would fit with (.*) \(([\d.]+) GiB\)", said
    ).groups()
    assert needed == f"{needed_with('', monkeypatch):.3g}"
    assert "--recompute-whitelist" in flags and "--use-distributed-optimizer" in flags
    assert then == f"{needed_with(flags, monkeypatch):.3g}" and float(then) <= 0.94 * 80
    describe(parsed(f"{LLAMA} {device} {flags}", monkeypatch))
    assert f"fits: {then} GiB of 75.2, 94% of 80" in capsys.readouterr().out


def test_changes_come_in_their_order_and_as_few_as_suffice(monkeypatch):
    args = parsed(f"{LLAMA} --cross-entropy-chunk-size 8192", monkeypatch)
    model, run = model_of(args), run_of(args)
    needed = bytes_needed(model, run)
    assert changes_to_fit(model, run, needed) == []
    (one,) = changes_to_fit(model, run, needed - 1)
    assert one.flags.endswith("--recompute-whitelist core_attention")
    first, second, *others = (change.flags for change in changes_to_fit(model, run, 22 * 2**30))
    assert (first.split()[0], second.split()[0]) == ("--recompute-granularity", "--cross-entropy-chunk-size")
    assert "--use-torch-fsdp2" in others
    assert "split the model" in advice(model, replace(run, seq_length=16), 2**20)  # no more ranks can split it


SHARDED = f"{LLAMA} --use-distributed-optimizer --device-memory 80GB"


def test_the_longest_sequence_fits_and_no_longer_one_does(monkeypatch, capsys):
    """Both of the line, that of the run and that with the advice; the tables are those of the first."""
    describe(parsed(f"{SHARDED} --longest", monkeypatch))
    said = capsys.readouterr().out
    found = re.search(
        r"longest sequence: ([\d,]+) tokens \(75.2 GiB of 75.2, 94% of 80\); ([\d,]+) with (.*)\n", said
    ).groups()
    tokens, more = (int(text.replace(",", "")) for text in found[:2])
    for length, flags in ((tokens, ""), (more, found[2])):
        args = parsed(f"{SHARDED} {flags}".replace("65536", str(length)), monkeypatch)
        model, run = model_of(args), run_of(args)
        assert bytes_needed(model, run) <= 0.94 * 80 * 2**30 < bytes_needed(model, replace(run, seq_length=length + 16))
    assert more > 2 * tokens and f"{tokens} tokens, {tokens // 8} per context rank" in said


def test_a_position_table_limits_the_longest_sequence(monkeypatch, capsys):
    gpt = LLAMA.replace("llama3-8b", "tiny-gpt3").replace(
        "65536", "64 --vocab-size 1023 --tokenizer-type NullTokenizer"
    )
    describe(parsed(f"{gpt} --device-memory 80GB --longest --max-position-embeddings 1030", monkeypatch))
    assert "longest sequence: 1,024 tokens (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--longest: needs a device; give --device-memory 80GB"),
        (
            "--device-memory 80GB",
            "no sequence fits: 16 tokens need 165 GiB of 75.2, 94% of 80; it would fit with --use-distrib",
        ),
        ("--device-memory 80GB --cp-strategy auto", "--longest: needs a strategy.*--cp-strategy ring"),
    ],
)
def test_there_is_no_longest_sequence(flags, message, monkeypatch):
    with pytest.raises(UsageError, match=message):
        describe(parsed(f"{LLAMA} --longest {flags}", monkeypatch))


def test_host_memory_comes_last(monkeypatch, capsys):
    """On one GPU there is nothing to share."""
    alone = f"{LLAMA} --context-parallel-size 1 --device-memory 80GB --mlp-chunks-for-training 16"
    monkeypatch.setattr(fit, "MOST_RANKS", 1)
    describe(parsed(alone, monkeypatch, 1))
    flags, then = re.search(r"would fit with (.*) \(([\d.]+) GiB\)", capsys.readouterr().out).groups()
    assert flags.endswith("--use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer")
    describe(parsed(f"{alone} {flags}", monkeypatch, 1))
    said = capsys.readouterr().out
    assert f"fits: {then} GiB of 75.2, 94% of 80" in said
    on_host = 16 * 8_030_261_248 + 32 * 65536 * 4096 * 2  # and the inputs of layers
    assert f"in host memory {on_host / 2**30:.2f} GiB" in re.sub(" +", " ", said)


def test_rounds_of_heads_are_advised_before_sharding(monkeypatch):
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --cp-strategy ulysses"
    args = parsed(f"{LLAMA} {flags} --seq-length 262144 --mlp-chunks-for-training 16", monkeypatch)
    model, run = model_of(args), run_of(args)
    (change,) = changes_to_fit(model, run, bytes_needed(model, run) - 1)
    assert change.flags == "--cp-head-rounds 4"


@pytest.mark.parametrize(
    ("flags", "sharders"),
    [
        ("", {"--use-distributed-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2"}),
        ("--tensor-model-parallel-size 2", {"--use-distributed-optimizer", "--use-torch-fsdp2"}),
        ("--pipeline-model-parallel-size 2", {"--use-distributed-optimizer"}),
        ("--fp16", {"--use-distributed-optimizer"}),
        ("--transformer-impl transformer_engine --fp8-format hybrid", {"--use-distributed-optimizer"}),
        ("--num-experts 4 --moe-ffn-hidden-size 8 --expert-model-parallel-size 2", {"--use-distributed-optimizer"}),
    ],
)
def test_the_trainer_accepts_each_advised_sharding(flags, sharders, monkeypatch):
    given = f"{LLAMA} {flags}" if flags != "--fp16" else LLAMA.replace("--bf16", flags)
    args = parsed(given, monkeypatch, ranks=16)
    advised = [change.flags for change in fit._shardings(model_of(args), run_of(args))]
    assert {text.split()[0] for text in advised} == sharders
    for text in advised:
        parsed(f"{given} {text}", monkeypatch, ranks=16)


@pytest.mark.parametrize("text", ["80TB", "much", "-3GB"])
def test_a_device_memory_that_is_none(text, monkeypatch):
    with pytest.raises(UsageError, match="--device-memory"):
        parsed(f"{LLAMA} --device-memory={text}", monkeypatch)


def test_a_rank_without_memory_says_what_needs_it(monkeypatch, capsys):
    args = parsed(LLAMA, monkeypatch)
    with pytest.raises(RuntimeError, match="can't allocate memory"), explain_out_of_memory(args):
        torch.empty(2**50, dtype=torch.uint8)
    said = capsys.readouterr().err
    assert re.search(r"MLP activations +\d+\.\d+ GiB", said)
    assert said.count("rank 0: out of memory; it would fit with --recompute-granularity full") == 1
    with pytest.raises(MemoryError), explain_out_of_memory(args):
        bytearray(2**60)
    assert "rank 0: out of memory" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory(args):
        raise RuntimeError("something else")
    assert not capsys.readouterr().err
