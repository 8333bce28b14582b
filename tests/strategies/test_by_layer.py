"""A strategy for each layer: how it is written, in our words and Megatron's, and that training stays exact."""

import pytest

from megatron.context_parallel import UsageError
from megatron.context_parallel.integration.spec import ContextParallelAttention
from megatron.context_parallel.strategies import choose_by_layer
from megatron.context_parallel.strategies.by_layer import written
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.dry_run import describe
from tests.support import training_case

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --dry-run"


def layers(flags: str) -> list[str]:
    args = parse_args(f"{SIZES} --context-parallel-size 4 {flags}".split())
    assert {choice.layout for choice in args.cp_layers} == {args.cp_layout}
    return [choice.spec for choice in args.cp_layers]


@pytest.mark.parametrize(
    ("flags", "specs"),
    [
        ("", ["ring"] * 4),
        (
            "--cp-strategy ring*2,mesh:grid=2x2,q_transfer_blocks=2.5*2",
            ["ring"] * 2 + ["mesh:grid=2x2,q_transfer_blocks=2.5"] * 2,
        ),
        ("--cp-strategy ring,ulysses,ring+mesh,ring", ["ring", "ulysses:layout=zigzag", "ring+mesh", "ring"]),
        ("--cp-strategy ring*3,lightseq", ["ring:layout=contiguous"] * 3 + ["lightseq"]),
        ("--cp-strategy ring:layout=cyclic,mesh*3", ["ring:layout=cyclic"] + ["mesh:layout=cyclic"] * 3),
        (
            "--cp-strategy ring*2,allgather*2 --cp-layout cyclic",
            ["ring:layout=cyclic"] * 2 + ["allgather:layout=cyclic"] * 2,
        ),
        ("--cp-comm-type p2p", ["ring"] * 4),
        ("--cp-comm-type all_gather", ["allgather"] * 4),
        ("--cp-comm-type a2a --cp-strategy ulysses", ["ulysses"] * 4),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", ["usp:head_parallel_size=2"] * 4),
        ("--cp-strategy ulysses:layout=zigzag --cp-layout zigzag", ["ulysses:layout=zigzag"] * 4),
        (
            "--bf16 --cp-strategy ring:partials_in_16_bits=True --cp-partials-in-16-bits",
            ["ring:partials_in_16_bits=True"] * 4,
        ),
        ("--cp-comm-type p2p p2p a2a a2a --cp-strategy ring*2,ulysses*2", ["ring"] * 2 + ["ulysses:layout=zigzag"] * 2),
    ],
)
def test_each_layer_has_its_strategy(flags, specs):
    found = layers(flags)
    assert found == specs
    # What is written is read as the same.
    again = written(choose_by_layer(",".join(found), 4, 4))
    assert [choice.spec for choice in choose_by_layer(again, 4, 4)] == found


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (
            "--cp-strategy ring*3,mesh*2",
            "--cp-strategy ring*3,mesh*2: is for 5 layers, but --num-layers is 4; give ring*3,mesh",
        ),
        (
            "--cp-strategy ring*99999999999",
            "--cp-strategy ring*99999999999: is for 99999999999 layers, but --num-layers is 4",
        ),
        (
            "--cp-strategy mesh*2,lightseq*2",
            "strategies have none (lightseq: contiguous; mesh: zigzag or cyclic)",
        ),
        ("--cp-strategy auto*2,ring*2", "auto chooses one strategy for all layers; give only auto"),
        (
            "--cp-strategy ring*2,usp:head_parallel_size=2,placement=context-first*2",
            "a rank would hold different tokens than with",
        ),
        ("--cp-strategy ring:layout=cyclic --cp-layout zigzag", "ring:layout=cyclic: layout is given twice; leave one"),
        ("--cp-strategy ring*2,typo*2", "--cp-strategy typo: unknown"),
        (
            "--cp-strategy ring --cp-comm-type a2a",
            "--cp-strategy ring: --cp-comm-type a2a means ulysses; give only one",
        ),
        ("--cp-strategy auto --cp-comm-type p2p", "--cp-strategy auto: --cp-comm-type p2p means ring; give only one"),
        ("--cp-comm-type p2p a2a", "--cp-comm-type p2p a2a: 2 values for 4 layers; give one, or one for each"),
        ("--cp-comm-type ring", "--cp-comm-type ring: unknown; choose "),
        ("--cp-comm-type a2a+p2p", "give --hierarchical-context-parallel-sizes 2 2"),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
            "--hierarchical-context-parallel-sizes 2 4: must be two numbers whose product is --context-parallel-size 4",
        ),
        (
            "--cp-comm-type p2p --hierarchical-context-parallel-sizes 2 2",
            "--hierarchical-context-parallel-sizes 2 2: needs --cp-comm-type a2a+p2p; add that or leave this out",
        ),
        (
            "--cp-comm-type a2a --num-attention-heads 2 --kv-channels 8",
            "; give --cp-strategy usp --cp-head-parallel-size 2, without --cp-comm-type a2a",
        ),
        (
            "--cp-comm-type p2p --cp-inner-ring-size 2",
            "not an option of ring; give --cp-strategy loongtrain, without --cp-comm-type p2p",
        ),
        (
            "--cp-comm-type p2p a2a p2p p2p --reset-attention-mask --cp-place-documents",
            "; give --cp-strategy ring, without --cp-comm-type p2p a2a p2p p2p",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_one_line(flags, refusal):
    with pytest.raises(UsageError) as caught:
        layers(flags)
    assert refusal in str(caught.value) and "\n" not in str(caught.value)


def test_a_dry_run_shows_the_traffic_of_each(capsys):
    describe(parse_args(f"{SIZES} --context-parallel-size 4 --cp-strategy ring*3,ulysses".split()))
    said = " ".join(capsys.readouterr().out.split())
    assert "ring*3,ulysses:layout=zigzag*1, zigzag" in said
    assert said.count("per layer of ring and") == said.count("per layer of ulysses:layout=zigzag and") == 2


MIX = "ring*2,ulysses,mesh"
SPREAD = {
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "cp_strategy": MIX,
}


def train_from(start: str, changes: dict) -> tuple[list[float], dict[int, str]]:
    """Losses of five steps, and the strategy of each layer of this rank."""
    used = {}
    with pytest.MonkeyPatch.context() as patch:
        forward = ContextParallelAttention.forward

        def noted(self, *given, **named):
            used[self.layer_number] = self.cp.choice.strategy.name
            return forward(self, *given, **named)

        patch.setattr(ContextParallelAttention, "forward", noted)
        run = training_case.train("llama", load=start, train_iters=7, num_layers=4, **changes)
    return run.losses, used


def train_two_steps(directory: str) -> None:
    training_case.train("llama", save=directory, train_iters=2, num_layers=4)


def test_training_goes_on_with_strategies_by_layer_over_stages_as_on_one_rank(ranks, tmp_path):
    ranks(1, train_two_steps, str(tmp_path))
    ((expected, _),) = ranks(1, train_from, str(tmp_path), {})
    runs = ranks(4, train_from, str(tmp_path), SPREAD)
    assert len(expected) == 5
    for losses, _ in runs:
        assert losses == pytest.approx(expected, rel=1e-6)
    stages = {1: "ring", 3: "ulysses"}, {2: "ring", 4: "mesh"}
    assert [used for _, used in runs] == [stages[0], stages[0], stages[1], stages[1]]
