"""megatron-core as a checkout of Megatron-LM uses it: our replacements against one rank without them.

With MEGATRON_LM_PATH=CHECKOUT the same holds for its own training loop.
"""

import os
import re
import subprocess
import sys
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron.context_parallel import UsageError
from megatron.context_parallel.integration import megatron_lm
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from tests.support.gpt_case import BATCH, LENGTH, VOCABULARY, config
from tests.support.megatron_lm_case import THD, train
from tests.support.releases import installed

support_cpu_host()


def test_training_equals_one_rank(ranks):
    (expected,) = ranks(1, train, [])
    assert expected[-1] < expected[0]
    for strategies in (["mesh:layout=cyclic"], ["usp:head_parallel_size=2", "ring"]):
        for losses in ranks(4, train, strategies):
            assert losses == pytest.approx(expected, rel=2e-6), strategies  # rounding grows with each step


def test_multi_latent_attention_equals_one_rank(ranks):
    (expected,) = ranks(1, train, [], "latent")
    assert expected[-1] < expected[0]
    for losses in ranks(4, train, ["mesh:layout=cyclic"], "latent"):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_packed_sequences_equal_one_rank(ranks, kind):
    (expected,) = ranks(1, train, [], kind)
    assert expected[-1] < expected[0]
    for n, strategies in ((1, ["ring"]), (4, ["mesh:layout=cyclic"]), (4, ["usp:head_parallel_size=2", "ring"])):
        for losses in ranks(n, train, strategies, kind):
            assert losses == pytest.approx(expected, rel=2e-6), strategies  # rounding grows with each step


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_packed_sequences_that_bridge_selects_equal_one_rank(ranks, kind):
    (expected,) = ranks(1, train, [], kind)
    for losses in ranks(4, train, ["mesh:layout=cyclic"], kind, 3, True):
        assert losses == pytest.approx(expected, rel=2e-6)


def refused_batches() -> list[str]:
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(3)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mask, bounds = torch.ones(BATCH, 1, LENGTH, LENGTH), torch.tensor([[0, LENGTH]])
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    said = []
    spec = get_gpt_layer_local_spec()
    models = {
        name: GPTModel(config(context_parallel_size=1), spec, VOCABULARY, LENGTH) for name in ("mtp", "aux", "own")
    }
    models["mtp"].config.mtp_num_layers, models["aux"].config.moe_aux_loss_coeff = 1, [0.0, 0.01]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in megatron_lm.replacements(["ring"], packed=True):
            patch.setattr(owner, name, value)
        model = GPTModel(config(), get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
        other = GPTModel(config(), get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
        other.config.multi_latent_attention = True
        cut, packed = utils.get_batch_on_this_cp_rank, PackedSeqParams("thd", bounds[0], bounds[0])
        calls = {
            "hybrid": lambda: cut({"tokens": None}, True),
            "masked": lambda: cut({"tokens": None, "attention_mask": mask}),
            "group": lambda: cut({"tokens": None}, alone),
            "other bounds": lambda: cut({"tokens": tokens[:1], "cu_seqlens_q": bounds}),
            "two rows": lambda: cut({"tokens": tokens, "cu_seqlens": bounds}),
            "not sharded": lambda: model(tokens, None, None, packed_seq_params=packed),
            "not packed": lambda: model(tokens, None, None),
            "latent": lambda: other(tokens, None, None, packed_seq_params=packed),
            **{name: partial(model, tokens, None, None) for name, model in models.items()},
        }
        if THD:
            calls["hybrid too"] = lambda: utils.get_batch_on_this_hybrid_cp_rank({}, 2)
        for name, call in calls.items():
            with pytest.raises(UsageError) as caught:
                call()
            said.append(f"{name}: {caught.value}")
    parallel_state.destroy_model_parallel()
    return said


def test_batches_that_would_be_cut_wrong_are_refused(ranks):
    hybrid = "hybrid context parallelism: not supported in Megatron-LM; use this project's trainer"
    for said in ranks(2, refused_batches):
        assert said == [
            f"hybrid: {hybrid}",
            "masked: attention_mask in the batch: give --no-create-attention-mask-in-dataloader",
            "group: cp_group of 1 ranks: batches are sharded over the context group of 2",
            "other bounds: cu_seqlens_q in the batch: unknown bounds of packed sequences; give cu_seqlens",
            "two rows: cu_seqlens: end at 24 for tokens [2, 24]; packed sequences must fill one row: give "
            "--micro-batch-size 1",
            "not sharded: packed sequences (thd): this batch was not sharded by the layout; shard it with "
            "megatron-core's get_batch_on_this_cp_rank",
            "not packed: packed sequences (thd): this pipeline stage got none; give --pipeline-model-parallel-size 2 "
            "or less, or take megatron-core 0.17 or later",
            "latent: packed sequences (thd): not supported with --multi-latent-attention; leave it out",
            "mtp: mtp_num_layers 1: multi-token prediction shifts tokens in megatron-core's own layout; give None",
            "aux: moe_aux_loss_coeff [0.0, 0.01]: over 2 ranks megatron-core gives it 1/2 of its weight; give 0",
            "own: core_attention DotProductAttention: not replaced; build the model after the replacements",
            *([f"hybrid too: {hybrid}"] if THD else []),
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


class OwnForward(GPTModel):
    """As Megatron-Bridge's Qwen3VLGPTModel: it calls its layers by itself, with tokens that it sharded in zigzag."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder(hidden, attention_mask=None)


def models_that_shard_by_themselves(strategy: str) -> list[str]:
    """What is said to embeddings of images, and to a model with its own forward."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(3)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in megatron_lm.replacements([strategy]):
            patch.setattr(owner, name, value)
        settings, spec = config(), get_gpt_layer_local_spec()
        given = torch.zeros(LENGTH // dist.get_world_size(), BATCH, settings.hidden_size)
        calls = (
            lambda: OwnForward(settings, spec, VOCABULARY, LENGTH)(given),
            lambda: GPTModel(settings, spec, VOCABULARY, LENGTH)(None, None, None, decoder_input=given),
        )
        for call in calls:
            try:
                said.append(str(call().isfinite().all().item()))
            except UsageError as error:
                said.append(str(error))
    parallel_state.destroy_model_parallel()
    return said


def test_models_that_shard_by_themselves_need_zigzag(ranks):
    zigzag = "shards sequences in zigzag; give a strategy with layout=zigzag, such as ring:layout=zigzag"
    for said in ranks(2, models_that_shard_by_themselves, "ring:layout=cyclic"):
        assert said == [
            f"--cp-layout cyclic: a model with its own forward {zigzag}",
            f"decoder_input, layout cyclic: a model of images or audio {zigzag}",
        ]
    for strategy, n in (("ring:layout=zigzag", 2), ("ring:layout=cyclic", 1)):
        for said in ranks(n, models_that_shard_by_themselves, strategy):
            assert said == ["True", "True"]


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
        (["--sft", "--overlap-moe-expert-parallel-comm"], "--overlap-moe-expert-parallel-comm: it drops packed seq"),
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


def packed_chats(folder: Path) -> list[str]:
    """Flags for supervised fine-tuning on lines of several chats each."""
    from transformers import AutoTokenizer

    from tests.support.chat_case import chat, tokenizer, write

    lines = []
    for line in range(20):
        messages = []
        for number in range(2 + line % 3):
            messages += chat("ab" * (number + 1), "cd" * (line % 5 + 1), system="s")["messages"]
        lines.append({"messages": messages})
    data, name = write(folder / "chats.jsonl", lines), tokenizer(folder / "tokenizer")
    made = AutoTokenizer.from_pretrained(name)
    made.add_special_tokens({"unk_token": "<unk>"})  # the format pads with it
    made.save_pretrained(name)
    flags = f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {name} --data-path {data} --micro-batch-size 1"
    sizes = "--sft-tokenizer-prompt-format nemotron-nano-v2 --seq-length 512 --max-position-embeddings 512"
    return [*flags.split(), *sizes.split()]


@pytest.mark.skipif("MEGATRON_LM_PATH" not in os.environ, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM")
@pytest.mark.parametrize("kind", ["plain", "documents", "chats"])
def test_a_checkout_trains_as_one_rank(kind, tmp_path):
    if kind != "plain" and installed("megatron-core") < (0, 19):
        pytest.skip("Megatron-LM masks between documents since 0.19, and before it reads chats with transformers 4")
    flags = packed_chats(tmp_path) if kind == "chats" else []
    if kind == "documents":
        flags = ["--dataloader-inter-document-masking"]
    # Megatron's own attention for packed sequences is Transformer Engine's.
    alone = [] if kind == "plain" else ["--cp-strategy", "ring"]
    expected = losses_of_a_checkout(1, *alone, *flags)
    assert len(expected) == 5
    spread = ["--cp-strategy", "mesh:layout=cyclic", "--context-parallel-size", "2"]
    assert losses_of_a_checkout(2, *spread, *flags) == pytest.approx(expected, rel=1e-6)
