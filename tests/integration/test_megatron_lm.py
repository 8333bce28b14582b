"""megatron-core as a checkout of Megatron-LM uses it: our replacements against one rank without them.

With MEGATRON_LM_PATH=CHECKOUT the same holds for its own training loop.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from megatron.context_parallel import UsageError
from megatron.context_parallel.integration import megatron_lm
from megatron.context_parallel.integration.transformer_engine import why_not_importable
from tests.support.gpt_case import BATCH, LENGTH, VOCABULARY, batch, config, hidden

STEPS = 5
PACKED = "get_thd_batch_on_this_cp_rank"  # until megatron-core 0.17; 0.19 has one function for all batches


class PlainAttention(torch.nn.Module):
    """PyTorch's attention as core attention, because megatron-core's own does not support multi-latent attention."""

    def __init__(self, softmax_scale: float, **others: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *others: object, **named: object) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def latent(strategies: list[str]) -> tuple[TransformerConfig, ModuleSpec]:
    """Multi-latent attention as DeepSeek's: values of another width, rotary embeddings (yarn) of a part of a head."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    others = {"num_query_groups": 4, "rope_type": "yarn", "multi_latent_attention": True, "qk_layernorm": True}
    given = vars(config()) | sizes | others
    names = {field.name for field in fields(MLATransformerConfig)}
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True, qk_layernorm=True)
    if not strategies:
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
    return MLATransformerConfig(**{name: value for name, value in given.items() if name in names}), spec


def train(strategies: list[str], multi_latent: bool = False) -> list[float]:
    """Losses by Megatron-LM's way: its spec, its function that cuts batches, its rotary embedding."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in megatron_lm.replacements(strategies) if strategies else ():
            patch.setattr(owner, name, value)
        model_parallel_cuda_manual_seed(3)
        settings, spec = config(), get_gpt_layer_local_spec(normalization="RMSNorm")
        if multi_latent:
            patch.setattr(multi_latent_attention, "HAVE_TE", not why_not_importable())
            settings, spec = latent(strategies)
        model = GPTModel(settings, spec, VOCABULARY, LENGTH, position_embedding_type="rope")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        data = {**batch(), "attention_mask": None}
        if strategies:
            data = utils.get_batch_on_this_cp_rank(data)
        losses = []
        for _ in range(STEPS):
            mask = None if strategies or multi_latent else hidden(None)
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


def test_multi_latent_attention_equals_one_rank(ranks):
    (expected,) = ranks(1, train, [], True)
    assert expected[-1] < expected[0]
    for losses in ranks(4, train, ["mesh:layout=cyclic"], True):
        assert losses == pytest.approx(expected, rel=1e-6)


def refused_batches() -> list[str]:
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    replaced = {name: value for _, name, value in megatron_lm.replacements(["ring"])}
    cut, said = replaced["get_batch_on_this_cp_rank"], []
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mask, lengths = torch.ones(BATCH, 1, LENGTH, LENGTH), torch.tensor([0, LENGTH])
    calls = {
        "with lengths": lambda: cut({"tokens": None, "cu_seqlens": lengths}, is_hybrid_cp=False),
        "hybrid": lambda: cut({"tokens": None}, True),
        "masked": lambda: cut({"tokens": None, "attention_mask": mask}),
        "group": lambda: cut({"tokens": None}, alone),
    }
    if PACKED in replaced:
        calls["packed"] = lambda: replaced[PACKED]({}, None, None, None)
    for name, call in calls.items():
        with pytest.raises(UsageError) as caught:
            call()
        said.append(f"{name}: {caught.value}")
    parallel_state.destroy_model_parallel()
    return said


def test_batches_that_would_be_cut_wrong_are_refused(ranks):
    packed = "packed sequences (thd): not supported in Megatron-LM; use this project's trainer"
    for said in ranks(2, refused_batches):
        assert said == [
            f"with lengths: {packed}",
            f"hybrid: {packed}",
            "masked: attention_mask in the batch: give --no-create-attention-mask-in-dataloader",
            "group: cp_group of 1 ranks: batches are sharded over the context group of 2",
            *([f"packed: {packed}"] if hasattr(utils, PACKED) else []),
        ]


def cut_by_bridge() -> tuple[torch.Tensor, ...]:
    """A batch and an embedding, cut as Megatron-Bridge's gpt_step and megatron-core's RotaryEmbedding ask for it."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    group = parallel_state.get_context_parallel_group()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in megatron_lm.replacements(["ring:layout=cyclic"]):
            patch.setattr(owner, name, value)
        from megatron.core.utils import get_batch_on_this_cp_rank  # by value, as Megatron-Bridge does

        whole = {"tokens": torch.arange(LENGTH).expand(BATCH, -1), "labels": None}
        part = get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, cp_group=group)
        rotary = RotaryEmbedding(8, 1.0, rotary_base=10000, use_cpu_initialization=True)
        # The argument for the group came with 0.13.
        named = {"cp_group": group} if "cp_group" in signature(rotary.forward).parameters else {}
        angles = rotary(LENGTH, **named)[:, 0, 0]
        expected = rotary.get_emb(LENGTH)[:, 0, 0]
    parallel_state.destroy_model_parallel()
    assert part["labels"] is None
    return part["tokens"], angles, expected


def test_what_bridge_calls_cuts_by_the_layout(ranks):
    for rank, (tokens, angles, expected) in enumerate(ranks(2, cut_by_bridge)):
        assert torch.equal(tokens, torch.arange(rank, LENGTH, 2).expand(BATCH, -1))
        assert torch.equal(angles, expected[rank::2])


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
        (["--mtp-num-layers=1"], "--mtp-num-layers: not supported, it shards sequences itself"),
        (["--sft"], "--sft: not supported"),
        (["--spec", "module", "spec"], "--spec: not supported, its layers keep their own attention"),
        (["--hybrid-layer-pattern=*-"], "--hybrid-layer-pattern: not supported, its layers keep their own attention"),
        (["--moe-aux-loss-coeff=0.01"], "--moe-aux-loss-coeff: not supported, over n context ranks .* 1/n of its"),
    ):
        with pytest.raises(UsageError, match=message):
            megatron_lm.complete(wrong)
    with pytest.raises(UsageError, match="--cp-attention-backend fast: unknown; choose auto"):
        megatron_lm.split_flags(["--cp-attention-backend", "fast"])
    with pytest.raises(UsageError, match=r"script pretrain\.py: no such file; give a script of Megatron-LM"):
        megatron_lm.main(["pretrain.py", "--cp-strategy", "ring"])


def losses_of_a_checkout(ranks: int, *flags: str) -> list[float]:
    """The output of a checkout's own training loop, from its unmodified pretrain_gpt.py."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    root = Path(__file__).parents[2]
    program = [str(root / "tests/support/megatron_lm_checkout.py"), os.environ["MEGATRON_LM_PATH"], *flags]
    environment = os.environ | {"PYTHONPATH": str(root), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, *launch, *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]


@pytest.mark.skipif("MEGATRON_LM_PATH" not in os.environ, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM")
def test_a_checkout_trains_as_one_rank():
    expected = losses_of_a_checkout(1)
    assert len(expected) == STEPS
    spread = ["--cp-strategy", "mesh:layout=cyclic", "--context-parallel-size", "2"]
    assert losses_of_a_checkout(2, *spread) == pytest.approx(expected, rel=1e-6)
