"""A whole GPTModel with our attention, over real processes, against megatron-core's own on one rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType

from megatron.context_parallel import LAYOUTS, ContextParallel, UsageError
from megatron.context_parallel.integration.batch import shard_batch
from megatron.context_parallel.integration.packed import PackedDocuments
from megatron.context_parallel.integration.rope import use_layout
from megatron.context_parallel.integration.spec import ContextParallelAttention, block_spec
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.placement import Placement
from tests.support.gpt_case import BATCH, CU_SEQLENS, LENGTH, VOCABULARY, WINDOW, batch, config, hidden

support_cpu_host()


SPREADS = [  # training runs have every strategy
    (1, "ring", "zigzag", {}),
    (2, "allgather", "cyclic", {}),
    (4, "ulysses", None, {}),
    (4, "loongtrain", "cyclic", {"head_parallel_size": 2, "placement": "context-first"}),
    (4, "mesh", None, {"head_parallel_size": 2}),
    (4, "lightseq", None, {"head_parallel_size": 2}),
]
MASKED = [  # tokens of two packed samples, or a window
    ("documents", 4, "ring", "zigzag", {}),
    ("documents", 3, "lightseq", None, {}),
    ("documents", 4, "usp", None, {"head_parallel_size": 2}),
    ("window", 4, "mesh", None, {}),
    ("window", 2, "ulysses", None, {}),
]
LEARNED = [(4, "ring", layout, {}) for layout in LAYOUTS]  # position ids come with the batch


def gradients(
    strategy: str | None,
    positions: str,
    layout: str | None = None,
    masked: str | None = None,
    softmax: str = "vanilla",
    **options: object,
) -> dict[str, torch.Tensor]:
    """Summed over ranks: the loss and every parameter's gradient; without a strategy, megatron-core's attention."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(3)
    settings = config(window_size=WINDOW if strategy and masked == "window" else None, softmax_type=softmax)
    spec, data = get_gpt_layer_local_spec(normalization="RMSNorm"), batch()
    if strategy:
        cp = ContextParallel(strategy, layout, parallel_state.get_context_parallel_group(), **options)
        spec, data = block_spec(settings, cp, settings.num_layers), shard_batch(data, cp)
    model = GPTModel(settings, spec, VOCABULARY, LENGTH, position_embedding_type=positions)
    if strategy:
        use_layout(model, cp)
    mask, packed = None if strategy else hidden(masked), None
    if strategy and masked == "documents":
        bounds = torch.tensor(CU_SEQLENS, dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=14, max_seqlen_kv=14)
    out = model(data["tokens"], data["position_ids"], mask, labels=data["labels"], packed_seq_params=packed)
    loss = (out * data["weight"]).sum()
    loss.backward()
    result = {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}
    for value in result.values():
        dist.all_reduce(value)
    parallel_state.destroy_model_parallel()
    return result


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_gradients_equal_megatron_core_on_one_rank(ranks, positions):
    (expected,) = ranks(1, gradients, None, positions)
    for n, strategy, layout, options in SPREADS if positions == "rope" else LEARNED:
        got = ranks(n, partial(gradients, **options), strategy, positions, layout)[0]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            error = (got[name] - value).norm() / value.norm()
            assert error < 1e-5, f"{strategy} {layout} {options} n={n} {name}: {error:.1e}"


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_packed_documents_and_windows_equal_megatron_core(ranks, positions):
    expected = {
        masked: ranks(1, partial(gradients, masked=masked), None, positions)[0] for masked in ("documents", "window")
    }
    assert expected["documents"]["loss"] != expected["window"]["loss"]
    for masked, n, strategy, layout, options in MASKED if positions == "rope" else MASKED[:1]:
        got = ranks(n, partial(gradients, masked=masked, **options), strategy, positions, layout)[0]
        for name, value in expected[masked].items():
            error = (got[name] - value).norm() / value.norm()
            assert error < 1e-5, f"{masked} {strategy} {layout} n={n} {name}: {error:.1e}"


def test_sinks_equal_megatron_core(ranks):
    for softmax in ("learnable", "off-by-one"):
        (expected,) = ranks(1, partial(gradients, softmax=softmax), None, "rope")
        assert any("softmax_offset" in name for name in expected) == (softmax == "learnable")
        for n, strategy in ((4, "mesh"), (4, "ulysses")) if softmax == "learnable" else ((2, "lightseq"),):
            got = ranks(n, partial(gradients, softmax=softmax), strategy, "rope")[0]
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                error = (got[name] - value).norm() / value.norm()
                assert error < 1e-5, f"{softmax} {strategy} n={n} {name}: {error:.1e}"


def refusals() -> list[str]:
    parallel_state.initialize_model_parallel()
    how = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    how |= {"cp": ContextParallel()}
    q = torch.randn(4, 1, 4, 8)
    attention = ContextParallelAttention(config(), **how)
    tries = [
        lambda: ContextParallelAttention(config(attention_dropout=0.1), **how),
        lambda: ContextParallelAttention(config(qk_clip=True), **how),
        lambda: ContextParallelAttention(config(window_size=(8, -3)), **how)(q, q[:, :, :2], q[:, :, :2], None),
        lambda: attention(q, q, q, torch.ones(4, 4)),
        lambda: attention(q, q, q, None, attn_mask_type=AttnMaskType.padding),
        lambda: attention(q, q, q, None, packed_seq_params=PackedSeqParams()),
        lambda: attention(q, q[:, :, :3], q[:, :, :3], None),
        lambda: block_spec(config(qk_l2_norm=True), how["cp"], 2),
        lambda: block_spec(config(num_moe_experts=2, moe_layer_freq=[1, 0]), how["cp"], 2),
        lambda: block_spec(config(num_moe_experts=2, transformer_impl="transformer_engine"), how["cp"], 2),
        lambda: block_spec(config(transformer_impl="inference_optimized", add_bias_linear=False), how["cp"], 2),
    ]
    messages = []
    for attempt in tries:
        with pytest.raises(UsageError) as refused:
            attempt()
        messages.append(str(refused.value))
    parallel_state.destroy_model_parallel()
    return messages


def test_what_attention_and_layers_cannot_do_is_refused(ranks):
    (messages,) = ranks(1, refusals)
    wanted = [
        "--attention-dropout 0.1",
        "qk_clip: needs the largest score",
        "--window-size (8, -3)",
        "causal",
        "padding",
        "use_layout",
        "3 key/value heads",
        "qk_l2_norm True: block_spec has no such layers; give False",
        "moe_layer_freq [1, 0]: block_spec gives all layers experts; give 1",
        "num_moe_experts 2: block_spec has none with transformer_impl 'transformer_engine'; give transformer_impl 'loc",
        "transformer_impl inference_optimized: give local or transformer_engine",
    ]
    assert all(word in message for word, message in zip(wanted, messages, strict=True)), messages


def wrong_calls() -> list[str]:
    """The errors for a layout, group, cache or batch that would give wrong numbers."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(3)
    whole, settings = batch(), config()
    cp = ContextParallel("ring", "cyclic", parallel_state.get_context_parallel_group())
    spec = block_spec(settings, cp, 2)
    model = GPTModel(settings, spec, VOCABULARY, LENGTH, position_embedding_type="learned_absolute")
    attention, q = model.decoder.layers[0].self_attention.core_attention, torch.randn(4, 1, 4, 8)
    settings.context_parallel_size = 4
    how = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self", "cp": cp}
    cut = shard_batch(whole, cp)
    tokens, places = cut["tokens"], cut["position_ids"]
    said = []
    ahead = GPTModel(config(mtp_num_layers=1), spec, VOCABULARY, LENGTH)
    sees = config(mrope_section=[1, 1, 2])
    sees = GPTModel(sees, spec, VOCABULARY, LENGTH, position_embedding_type="mrope")
    for attempt in (
        lambda: attention(q, q, q, None),
        lambda: attention(q[:1], q, q, None),
        lambda: ContextParallelAttention(settings, **how),
        lambda: use_layout(ahead, cp),
        lambda: use_layout(sees, cp),
        lambda: use_layout(model, cp) or model(tokens, places, None, labels=whole["labels"]),
        lambda: model(tokens, whole["position_ids"], None),
        lambda: model(tokens, None, None),
        lambda: model(whole["tokens"], whole["position_ids"], None, labels=whole["labels"]),
        lambda: model(tokens, places, torch.ones(BATCH, 1, LENGTH, LENGTH)),
        lambda: model(tokens, places, None, inference_context=object()),
    ):
        with pytest.raises(UsageError) as refused:
            attempt()
        said.append(str(refused.value))
    parallel_state.destroy_model_parallel()
    return said


def test_wrong_calls_are_told(ranks):
    for said in ranks(2, wrong_calls):
        for line, start in zip(
            said,
            (
                "--cp-layout cyclic: the model's RoPE uses zigzag; call use_layout(model, cp) first",
                "1 queries, 4 keys: megatron-core's caches are not supported; use Session",
                "--context-parallel-size 4: the group of cp has 2 ranks; give ContextParallel(strategy, group=",
                "mtp_num_layers 1: multi-token prediction shifts tokens in megatron-core's own layout; give None",
                "position_embedding_type mrope: megatron-core cuts its angles in zigzag; take that, without use_lay",
                "labels [2, 24] for tokens [2, 12]: shard all of them with shard_batch(batch, cp)",
                "position_ids [2, 24] for tokens [2, 12]: shard all of them with shard_batch(batch, cp)",
                "position_ids: missing; give those of shard_batch(batch, cp)",
                "tokens [2, 24] on each of 2 ranks: more than max_sequence_length 24; shard them with shard_batch",
                "attention mask causal: give causal or no_mask, without a mask tensor",
                "inference_context: megatron-core's caches do not support layouts; generate with Session",
            ),
            strict=True,
        ):
            assert line.startswith(start) and "\n" not in line


def tokens_elsewhere() -> list[str]:
    """What is said to a model without `use_layout` if a rank does not have the tokens of megatron-core's layout."""
    parallel_state.initialize_model_parallel(context_parallel_size=4)
    settings = config()
    settings.context_parallel_size = 4
    group = parallel_state.get_context_parallel_group()
    apart = ContextParallel("usp", group=group, head_parallel_size=2, placement="context-first")
    placed = Documents(torch.zeros(16, dtype=torch.int64)).placed(Placement([[(4 * i, 4 * i + 4)] for i in range(4)]))
    q = torch.randn(4, 1, 4, 8)
    said = []
    for cp, packed in ((apart, None), (ContextParallel(group=group), PackedDocuments(documents=placed))):
        attention = ContextParallelAttention(settings, 1, AttnMaskType.causal, "self", cp=cp)
        with pytest.raises(UsageError) as refused:
            attention(q, q, q, None, packed_seq_params=packed)
        said.append(str(refused.value))
    parallel_state.destroy_model_parallel()
    return said


def test_tokens_elsewhere_need_our_rotary_embedding(ranks):
    for apart, placed in ranks(4, tokens_elsewhere):
        assert apart.startswith(
            "--cp-placement context-first: the model's RoPE has the chunks in the order of the rank"
        )
        assert placed == "documents with a placement: the model's RoPE uses zigzag; call use_layout(model, cp) first"
