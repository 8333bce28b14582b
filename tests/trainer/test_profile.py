"""`--profile`: the trace of a run has the blocks and the communication of its plans, by their names in a simulation."""

import json
from argparse import Namespace
from collections import Counter

import pytest
import torch

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.ir import Send, T, batches
from megatron.context_parallel.plan.pictures.labels import label
from megatron.context_parallel.runtime import profiler_ranges
from megatron.context_parallel.runtime.profiler_ranges import marks
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.profiling import trace_path
from tests.support import training_case

LAYERS, MICRO_BATCHES = 2, 2


def profiled(folder: str, strategy: str) -> None:
    profile = {"profile": True, "use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 2}
    profile |= {"profile_ranks": [1], "tensorboard_dir": folder}
    training_case.train("llama", train_iters=3, context_parallel_size=2, cp_strategy=strategy, **profile)
    assert not marks.on


def expected(spec: Namespace, rank: int) -> Counter:
    """(lane, name) of all blocks and batches of an iteration."""
    found = Counter[tuple[str, str]]()
    for backward in (False, True):
        plan = spec.plan(2, heads=4, kv_heads=2, backward=backward)
        place = plan.grid.coordinates(rank)["context"]
        for step in plan.steps[place]:
            found.update(("blocks", label((block,))) for block in step.attend)
            found.update((channel, label(ops)) for channel, ops in batches(step.comm))
        found.update((swap.channel, label((swap,))) for swap in plan.swaps)
    return Counter({what: count * LAYERS * MICRO_BATCHES for what, count in found.items()})


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_trace_has_the_blocks_and_batches_of_the_plans(strategy, ranks, tmp_path):
    ranks(2, profiled, str(tmp_path), strategy)
    assert [path.name for path in tmp_path.iterdir()] == [trace_path("", 1).name]  # of the ranks asked for
    events = json.loads(trace_path(str(tmp_path), 1).read_text())["traceEvents"]
    want = expected(parse_spec(strategy, layout="zigzag"), 1)
    lanes = [("blocks", e["name"], e) for e in events if e.get("cat") == "user_annotation" and "queries" in e["name"]]
    lanes += [(e["tid"], e["name"], e) for e in events if e.get("cat") == "plan"]
    assert Counter((lane, name) for lane, name, _ in lanes) == want
    steps = [e for e in events if e.get("ph") == "X" and e["name"] == "aten::mm"]
    first, last = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    assert all(first < e["ts"] and e["ts"] + e["dur"] < last for *_, e in lanes)  # all lanes have one clock


def test_on_a_gpu_batches_have_the_times_of_its_stream(monkeypatch):
    """The host only queues a wait: it takes no time there."""

    class Stream:
        now = 7.0  # milliseconds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Stream.now

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    class Work:
        def wait(self):
            Stream.now += 40

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(profiler_ranges, "time_ns", lambda: 10**9)
    marks.start()
    Stream.now += 2
    work = marks.batch("ring", (Send(T.KV, 0, 1),), Work())
    work.wait()
    work.wait()
    (batch,) = marks.stop()
    assert (batch.channel, batch.begin, batch.end) == ("ring", 10**9 + 2 * 10**6, 10**9 + 42 * 10**6)
    assert not marks.on and marks.stop() == []


FLAGS = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1 "
FLAGS += "--micro-batch-size 1 --train-iters 20 --tokenizer-type NullTokenizer --vocab-size 16 --data-path x "


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--use-pytorch-profiler", "--use-pytorch-profiler: needs --profile; add that or leave this out"),
        ("--profile", "--profile: nsys profiles GPUs, and this host has none; give --use-pytorch-profiler"),
        (
            "--profile --use-pytorch-profiler",
            "needs a directory for its traces; give --tensorboard-dir DIR, or",
        ),
        ("--profile --profile-step-start 12", "must be below --profile-step-end 12; give --profile-step-end 14"),
        ("--profile --profile-step-start 20 --profile-step-end 21", "the run ends earlier, with --train-iters 20"),
        ("--profile --profile-ranks 0 3", "--profile-ranks 0 3: there is no rank 3 among the 1 ranks; give"),
    ],
)
def test_what_cannot_be_profiled_is_refused(flags, message):
    with pytest.raises(UsageError) as refused:
        parse_args((FLAGS + flags).split())
    assert message in str(refused.value)
