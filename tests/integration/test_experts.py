"""Experts in the trainer: losses and gradient norms of one rank, whatever ranks share sequences and experts."""

import pytest
import torch

from megatron.context_parallel import UsageError
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.workload import model_of
from tests.support import training_case

STEPS = 5
CP, EP = "context_parallel_size", "expert_model_parallel_size"
PLAIN = {"use_distributed_optimizer": False}
# The auxiliary loss has a large weight: by megatron-core's router, gradient norms on 4 ranks are off by a quarter.
MODEL = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
EXPERTS = {**MODEL, "moe_aux_loss_coeff": 0.5}
SPREADS = {
    "cp4 mesh": {CP: 4, "cp_strategy": "mesh", "cp_layout": "cyclic"},
    "cp2 ep2 alltoall, recomputed": {
        **{CP: 2, EP: 2, "moe_token_dispatcher_type": "alltoall", "cross_entropy_chunk_size": 6},
        **{"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
}


def train(changes: dict) -> tuple[list[float], list[float]]:
    run = training_case.train("llama", **{"train_iters": STEPS, **EXPERTS, **changes})
    return run.losses, run.grad_norms


@pytest.fixture(scope="module")
def one_rank(ranks, tmp_path_factory) -> tuple[str, list[float], list[float]]:
    """Where its first weights are, losses and gradient norms."""
    start = str(tmp_path_factory.mktemp("start"))
    ranks(1, training_case.save_initial, "llama", start, EXPERTS)
    return start, *ranks(1, train, {"load": start, "finetune": True})[0]


@pytest.mark.parametrize("spread", SPREADS)
def test_every_step_is_that_of_one_rank(ranks, one_rank, spread):
    start, losses, norms = one_rank
    for run in ranks(4, train, {"load": start, "finetune": True, **SPREADS[spread]}):
        assert run[0] == pytest.approx(losses, rel=1e-6)
        assert run[1] == pytest.approx(norms, rel=1e-6)


def test_placed_documents_are_those_of_one_rank(ranks, one_rank):
    start, losses, _ = one_rank
    packed = {"load": start, "finetune": True, "reset_attention_mask": True, "eod_token": 3}
    ((expected, norms),) = ranks(1, train, packed)
    assert expected != pytest.approx(losses, rel=1e-4)
    spread = SPREADS["cp2 ep2 alltoall, recomputed"]
    for run in ranks(4, train, {**packed, **spread, "cp_place_documents": True}):
        assert run[0] == pytest.approx(expected, rel=1e-6)
        assert run[1] == pytest.approx(norms, rel=1e-6)


def test_the_auxiliary_loss_has_a_part(ranks, one_rank):
    start, _, norms = one_rank
    (without,) = ranks(1, train, {"load": start, "finetune": True, "moe_router_load_balancing_type": "none"})
    assert without[1][0] != pytest.approx(norms[0], rel=0.1)


def test_a_run_goes_on_with_other_expert_ranks(ranks, one_rank, tmp_path):
    start, losses, norms = one_rank
    saved = {"save": str(tmp_path), "exit_interval": 3, CP: 2, EP: 2}
    ranks(4, train, {"load": start, "finetune": True, **saved})
    for run in ranks(2, train, {"load": str(tmp_path), CP: 2, **PLAIN}):
        assert run[0] == pytest.approx(losses[3:], rel=1e-6)
        assert run[1] == pytest.approx(norms[3:], rel=1e-6)


def test_experts_have_the_loss_scale_of_the_other_weights(ranks):
    half = {"fp16": True, "params_dtype": torch.float16, EP: 2, "lr": 0.0, "min_lr": 0.0, "train_iters": 8}
    scaled = half | {"initial_loss_scale": 2.0**16, "loss_scale_window": 1, "hysteresis": 1}
    (_, expected), _ = ranks(2, train, half | {"loss_scale": 128.0})
    for _, norms in ranks(2, train, scaled):
        kept = [pair for pair in zip(norms, expected, strict=True) if pair[0] is not None]
        assert 0 < len(kept) < len(norms)  # some overflowed
        for norm, right in kept:
            assert norm == pytest.approx(right, rel=1e-3)


FLAGS = (
    "--world --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --dry-run "
    "--swiglu --disable-bias-linear --normalization RMSNorm --num-experts 4 --moe-ffn-hidden-size 24"
)


def flags(more: str = "") -> list[str]:
    return FLAGS.replace("--world", more).split()


def parameters() -> int:
    args = training_case.case_args("llama", **EXPERTS)
    with training_case.groups(args):
        return sum(p.numel() for p in training_case.build(args).model[0].parameters())


def test_parameters_and_operations_are_counted(ranks):
    family = "--position-embedding-type rope --group-query-attention --num-query-groups 2"
    vocabulary = "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 1"
    shared = "--untie-embeddings-and-output-weights --moe-shared-expert-intermediate-size 16"
    model = model_of(parse_args(flags(f"{family} {vocabulary} {shared}")))
    assert model.parameters == ranks(1, parameters)[0]
    # Each token passes the router, two experts and the shared one: three products of SwiGLU.
    dense = model_of(parse_args(flags(f"{family} {vocabulary}")[:-4]))
    assert dense.num_experts is None
    mlp, routed = 2 * 32 * dense.ffn_hidden_size * 3, 2 * 32 * (4 + (2 * 24 + 16) * 3)
    assert model.flops_per_sequence(64) - dense.flops_per_sequence(64) == 3 * 64 * 2 * (routed - mlp)


@pytest.mark.parametrize(
    ("more", "world", "message"),
    [
        ("--moe-router-topk 1", 1, "--moe-router-topk 1: the softmax of one score .* give --moe-router-pre-softmax"),
        ("--moe-router-topk 5", 1, "--moe-router-topk 5: more than --num-experts 4; give --moe-router-topk 4"),
        ("--expert-model-parallel-size 3", 3, "--expert-model-parallel-size 3: does not divide --num-experts 4"),
        ("--expert-model-parallel-size 4", 2, "4: does not divide the 2 data x context ranks; give .* 2"),
        (
            "--expert-model-parallel-size 2 --use-distributed-optimizer --num-distributed-optimizer-instances 4",
            4,
            "instances 4: does not divide 2, the ranks of an expert .* give --num-distributed-optimizer-instances 2$",
        ),
        ("--tensor-model-parallel-size 2", 2, "needs --sequence-parallel with --num-experts 4"),
        ("--cp-strategy auto", 1, "--cp-strategy auto: its time model does not support --num-experts 4; give"),
        (
            "--moe-layer-freq 2",
            1,
            "--moe-layer-freq 2: a flag of Megatron-LM that is not supported; all layers have experts",
        ),
    ],
)
def test_what_experts_do_not_go_with_is_told(more, world, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(UsageError, match=message):
        parse_args(flags(more))


def test_outputs_that_biased_experts_change_are_not_kept():
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    given = flags(f"{full} --recompute-whitelist fc1 fc2")
    assert parse_args(given).recompute_whitelist == ["fc1", "fc2"]
    given.remove("--disable-bias-linear")
    with pytest.raises(UsageError, match=r"--recompute-whitelist fc2: experts with biases .* in place; leave fc2 out"):
        parse_args(given)
