"""Kinds of sharding (optimizer, gradients, weights): none changes the run, and each resumes from any other."""

import pytest
import torch

from megatron.context_parallel.trainer.checkpoint import optimizer_state
from megatron.context_parallel.trainer.checkpoint.tensor_owners import Shard, whole_tensors
from tests.support import zero_case

EVALUATED = {"eval_iters": 1, "eval_interval": 1}  # before each save
RELAY = [  # who trains a step of the run, the last one two, and how it saves
    ("plain", {}),
    ("optim_grads_params, 2 instances", {"async_save": True} | EVALUATED | zero_case.IN_CHUNKS),
    ("torch_fsdp2", EVALUATED | zero_case.MESH | zero_case.IN_CHUNKS | zero_case.KEPT),
    ("distributed optimizer, 2 instances", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    ("optim_grads", zero_case.MESH | zero_case.IN_CHUNKS | zero_case.KEPT),
]


def test_a_run_that_changes_hands_is_that_of_plain_ddp(ranks, tmp_path):
    # Gradient norms too: Adam hides a constant scale of the gradients from the losses.
    steps = len(RELAY) + 1
    losses, norms = ranks(4, zero_case.train, "llama", zero_case.PLAIN | {"train_iters": steps})[0]
    for turn, (way, how) in enumerate(RELAY):
        start, end = turn, steps if turn == len(RELAY) - 1 else turn + 1
        checkpoints = {"save": str(tmp_path), "exit_interval": end} | ({"load": str(tmp_path)} if turn else {})
        for run in ranks(4, zero_case.train, "llama", zero_case.WAYS[way] | how | checkpoints | {"train_iters": steps}):
            assert run[0] == pytest.approx(losses[start:end], rel=1e-6), way
            assert run[1] == pytest.approx(norms[start:end], rel=1e-6), way


def test_a_run_in_float32_begins_with_the_float32_weights_of_one_in_16_bits(ranks, tmp_path):
    """A checkpoint has its weights in both. Each rank restores its share of those in float32. The norm has no limit."""
    half = {"bf16": True, "params_dtype": torch.bfloat16, "exit_interval": 2, "save": str(tmp_path)}
    ranks(2, zero_case.train, "llama", half)
    found = []
    for way in ("plain", "distributed optimizer", "optim_grads_params", "torch_fsdp2"):
        how = zero_case.WAYS[way] | {"load": str(tmp_path), "train_iters": 3, "clip_grad": 0.0}
        found += ranks(2, zero_case.train, "llama", how)
    for losses, norms in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        assert norms == pytest.approx(found[0][1], rel=1e-6)


def test_ranks_without_rows_of_a_weight_give_no_kernel_an_empty_tensor(ranks):
    expected = ranks(6, zero_case.train_with_all_rows)
    for (losses, norms, smallest), whole in zip(ranks(6, zero_case.train_with_few_rows), expected, strict=True):
        assert smallest > 0
        assert losses == pytest.approx(whole[0], rel=1e-6)
        assert norms == pytest.approx(whole[1], rel=1e-6)


def test_fsdp2_updates_shards_with_pytorchs_adam(ranks):
    (losses, norms), *_ = ranks(2, zero_case.train_with_all_rows)
    for found in ranks(2, zero_case.train_beside_another_adam):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(norms, rel=1e-6)


def test_fsdp2_shards_each_layer_before_the_next_is_built(ranks):
    (found,) = ranks(1, zero_case.whole_when_sharding)
    layer, table, norm = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 48 + 2 * 32, 64 * 32, 32
    assert found == [layer, layer, table, table + norm]  # layers, embedding; then the output layer and its norm


@pytest.mark.parametrize("way", ["optim_grads_params, 2 instances", "distributed optimizer, 2 instances"])
def test_a_rank_has_its_part_of_a_checkpoint_alone(ranks, way):
    found = ranks(4, zero_case.bytes_to_save, way)
    assert sum(mine for mine, *_ in found) == found[0][1]  # two ranks share what the two others have too
    for mine, everything, largest in found:
        assert mine <= everything / 2 + largest


def test_the_writer_alone_copies_to_the_host_what_each_rank_has():
    there = torch.empty(3, device="meta")
    (whole,) = whole_tensors([Shard(there, there.shape, shares=None, written=True)], torch.float32, loading=False)
    assert whole is not None and whole.is_meta


@pytest.mark.parametrize("way", ["plain", "distributed optimizer", "optim_grads"])
def test_the_count_of_steps_of_another_adam_goes_on(ranks, tmp_path, way):
    (losses, *_) = ranks(2, zero_case.train_with_counts_in_groups, zero_case.WAYS[way])
    saves = zero_case.WAYS[way] | {"save": str(tmp_path), "exit_interval": 2}
    ranks(2, zero_case.train_with_counts_in_groups, saves)
    found = ranks(2, zero_case.train_with_counts_in_groups, zero_case.WAYS[way] | {"load": str(tmp_path)})
    assert found[0] == pytest.approx(losses[2:], rel=1e-6)


@pytest.mark.parametrize("fused, place", [(True, "meta"), (False, "cpu")])
def test_counts_of_steps_are_where_the_kernel_of_pytorchs_adam_reads_them(fused, place):
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.empty(4, device="meta"))])
    adam.param_groups[0]["fused"] = fused
    ((_, step),) = optimizer_state.with_steps(adam, 3)
    assert step.device.type == place
