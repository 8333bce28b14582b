"""What a checkout of Megatron-LM uses of megatron-core, with our replacements: losses of one rank without them.

With MEGATRON_LM_PATH=CHECKOUT the same holds for its own functions.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from test_model import BATCH, LENGTH, VOCABULARY, batch, config, hidden

from megatron.context_parallel import UsageError
from megatron.context_parallel.integration import megatron_lm

STEPS = 5


def train(strategies: list[str]) -> list[float]:
    """Losses by Megatron-LM's way: its spec, its function that cuts batches, its rotary embedding."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in megatron_lm.replacements(strategies) if strategies else ():
            patch.setattr(owner, name, value)
        model_parallel_cuda_manual_seed(3)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        model = GPTModel(config(), spec, VOCABULARY, LENGTH, position_embedding_type="rope")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        data = {**batch(), "attention_mask": None}
        if strategies:
            data = utils.get_batch_on_this_cp_rank(data)
        losses = []
        for _ in range(STEPS):
            mask = None if strategies else hidden(None)
            out = model(data["tokens"], data["position_ids"], mask, labels=data["labels"])
            loss = (out * data["weight"]).sum()
            loss.backward()
            for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    parallel_state.destroy_model_parallel()
    return losses


def test_training_equals_one_rank(ranks):
    (expected,) = ranks(1, train, [])
    assert expected[-1] < expected[0]
    for strategies in (["mesh:layout=cyclic"], ["usp:head_parallel_size=2", "ring"]):
        for losses in ranks(4, train, strategies):
            assert losses == pytest.approx(expected, rel=1e-6), strategies


def packed_and_masked() -> list[str]:
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    said, replaced = [], {name: value for _, name, value in megatron_lm.replacements(["ring"])}
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH)
    for name, arguments in (
        ("get_thd_batch_on_this_cp_rank", ({}, None, None, None)),
        ("get_batch_on_this_cp_rank", ({"tokens": None, "attention_mask": mask},)),
    ):
        with pytest.raises(UsageError) as caught:
            replaced[name](*arguments)
        said.append(str(caught.value))
    parallel_state.destroy_model_parallel()
    return said


def test_batches_that_would_be_cut_wrong_are_refused(ranks):
    ((packed, masked),) = ranks(1, packed_and_masked)
    assert packed.startswith("packed sequences (thd): not supported in Megatron-LM")
    assert masked == "attention_mask in the batch: give --no-create-attention-mask-in-dataloader"


def test_flags_are_told_apart_and_completed():
    flags = ["--num-layers", "4", "--cp-strategy", "mesh:grid=2x2", "--context-parallel-size", "4"]
    strategies, backend, theirs = megatron_lm.split_flags(flags)
    assert (strategies, backend) == (["mesh:grid=2x2"], "auto")
    assert theirs == ["--num-layers", "4", "--context-parallel-size", "4"]
    both = [
        *theirs,
        "--cp-comm-type",
        "a2a+p2p",
        "p2p",
        "p2p",
        "p2p",
        "--hierarchical-context-parallel-sizes",
        "2",
        "2",
    ]
    assert megatron_lm.split_flags(both) == (["usp:head_parallel_size=2", *["ring"] * 3], "auto", theirs)
    whole, added = megatron_lm.complete([*theirs, "--attention-dropout=0"])
    assert added == ["--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss"]
    assert whole == [*theirs, "--attention-dropout=0", *added]
    for wrong, message in (
        (["--attention-dropout", "0.1"], "--attention-dropout 0.1: context-parallel attention has no dropout; give"),
        (["--mtp-num-layers=1"], "--mtp-num-layers: not supported, it cuts sequences by itself"),
        (["--sft"], "--sft: not supported"),
    ):
        with pytest.raises(UsageError, match=message):
            megatron_lm.complete(wrong)
    with pytest.raises(UsageError, match="--cp-attention-backend fast: unknown; choose auto"):
        megatron_lm.split_flags(["--cp-attention-backend", "fast"])
    with pytest.raises(UsageError, match=r"script pretrain\.py: no such file; give Megatron's"):
        megatron_lm.main(["pretrain.py", "--cp-strategy", "ring"])


_IMPORTS = """
import sys
from megatron.context_parallel.integration import host, megatron_lm
sys.path.insert(0, sys.argv[1])
host.support_cpu_host()
ours = {name: value for owner, name, value in megatron_lm.replacements(["ring"]) if not setattr(owner, name, value)}
import megatron.core, pretrain_gpt
assert megatron.core.__file__.startswith(sys.argv[1]), megatron.core.__file__
for name in ("get_batch_on_this_cp_rank", "get_thd_batch_on_this_cp_rank", "get_batch_on_this_hybrid_cp_rank"):
    assert getattr(pretrain_gpt, name) is ours[name], name
"""


@pytest.mark.skipif("MEGATRON_LM_PATH" not in os.environ, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM")
def test_a_checkout_imports_what_is_replaced():
    subprocess.run([sys.executable, "-c", _IMPORTS, os.environ["MEGATRON_LM_PATH"]], check=True, timeout=300)
