"""Models of HuggingFace transformers with our attention: losses and gradients of one rank with its own."""

import pickle
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import ContextParallel, UsageError
from megatron.context_parallel.kernels.choose import check_backend
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.place_documents import Costs, place
from tests.support.transformers_case import (
    BATCH,
    HEADS,
    LENGTH,
    SIZES,
    accelerated,
    batch,
    model_of,
    train,
    transformers,
)


@pytest.mark.parametrize(
    ("family", "specs", "kind"),
    [
        ("llama", ["lightseq", "ulysses"], "whole"),
        ("llama", ["attention2d"], "packed"),
        ("llama", ["mesh"], "padded"),
        ("qwen3", ["ring"], "whole"),
        ("mistral", ["ring:layout=contiguous"], "whole"),
        ("gemma2", ["mesh"], "whole"),
    ],
)
def test_training_equals_one_rank(ranks, family, specs, kind):
    (expected,) = ranks(1, train, family, None, kind)
    for spec in specs:
        for losses in ranks(4, train, family, spec, kind):
            assert losses == pytest.approx(expected, abs=1e-6), spec
    assert expected[-1] < expected[0] - 0.05


@pytest.mark.parametrize(
    ("family", "spec", "kind"), [("llama", "direct", "packed"), ("mistral", "usp:head_parallel_size=2", "padded")]
)
def test_placed_documents_train_as_on_one_rank(ranks, family, spec, kind):
    (expected,) = ranks(1, train, family, None, kind)
    for losses in ranks(4, train, family, spec, kind, False, True):
        assert losses == pytest.approx(expected, abs=1e-6)


def _of_another_batch() -> str:
    from megatron.context_parallel.integration.transformers import register, shard_batch

    cp, model = ContextParallel("direct"), model_of("llama")
    register(cp, model)
    packed = batch("packed")
    placed = shard_batch(cp, packed, place=partial(place, costs=Costs(1.0)))
    logits = model(**placed, use_cache=False).logits
    with pytest.raises(UsageError) as error:
        model(**shard_batch(cp, {name: x[:1] for name, x in packed.items()}), documents=placed["documents"])
    again = model(**shard_batch(cp, packed), use_cache=False).logits  # the layout's tokens, with their own documents
    assert logits.shape[0] == 1 and again.shape[0] == BATCH
    equal(cp, again, one_rank("llama", packed["position_ids"])[0])
    return str(error.value)


def test_documents_belong_to_one_call(ranks):
    for words in ranks(2, _of_another_batch):
        assert words.startswith(f"position_ids: {LENGTH // 2} on each of 2 ranks for documents of {2 * LENGTH} tokens")


def test_lora_equals_one_rank(ranks):
    pytest.importorskip("peft", reason="needs the package peft")
    (expected,) = ranks(1, train, "llama", None, "whole", True)
    for losses in ranks(4, train, "llama", "mesh", "whole", True):
        assert losses == pytest.approx(expected, abs=1e-6)
    assert abs(expected[-1] - expected[0]) > 0.01  # the adapters were trained


def packed_in(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).expand(BATCH, -1)


def one_rank(family: str, places: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and gradients of the model's own attention."""
    model = model_of(family)
    logits = model(input_ids=batch()["input_ids"], position_ids=places, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def equal(cp: ContextParallel, got: torch.Tensor, whole: torch.Tensor) -> None:
    torch.testing.assert_close(got, cp.shard(whole, 1), rtol=1e-4, atol=1e-5)


def refilled() -> None:
    """One tensor of position ids for all batches; two models at once, each with a context group of its own."""
    from megatron.context_parallel.integration.transformers import register

    tokens = batch()["input_ids"]
    first, second = packed_in(5, 1, 30, 12), packed_in(20, 28)
    models = {ContextParallel(*how): model_of("llama").eval() for how in (("ring",), ("mesh", "cyclic"))}
    for cp, model in models.items():
        register(cp, model)
    for cp, model in models.items():
        places, cut = cp.shard(first, 1).clone(), {"input_ids": cp.shard(tokens, 1), "use_cache": False}
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        logits = model(**cut, position_ids=places).logits
        places.data[:] = cp.shard(second, 1)  # which no version counter tells
        exact, gradients = one_rank("llama", first)
        equal(cp, logits.detach(), exact)
        (logits.square().mean() / cp.n).backward()  # computes each layer again
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            dist.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-6)
        model.eval()
        exact, _ = one_rank("llama", second)
        with torch.no_grad():
            equal(cp, model(**cut, position_ids=places).logits, exact)


def test_position_ids_that_are_refilled_are_read_again(ranks):
    ranks(2, refilled)


def masked() -> None:
    from megatron.context_parallel.integration.transformers import register

    cp, tokens = ContextParallel("ring"), batch()["input_ids"]
    for family in ("gemma3", "qwen2_moe"):  # windows of both sides; a mask that no layer uses and is none
        for places in (packed_in(LENGTH), packed_in(20, 28)):
            exact = one_rank(family, places)[0]
            model = model_of(family)
            register(cp, model)
            cut = {"input_ids": cp.shard(tokens, 1), "position_ids": cp.shard(places, 1)}
            equal(cp, model(**cut, use_cache=False).logits.detach(), exact)


def as_long_as_chunks() -> None:
    """Documents that look like the positions of each rank's own tokens, and one row of them for two samples."""
    from megatron.context_parallel.integration.transformers import register

    tokens, places = batch()["input_ids"], packed_in(LENGTH // 2, LENGTH // 2)
    exact, _ = one_rank("llama", places)
    for cp in (ContextParallel("ring", "contiguous"), ContextParallel("ring", "zigzag")):
        for rows in (places, places[:1]):
            model = model_of("llama")
            register(cp, model)
            cut = {"input_ids": cp.shard(tokens, 1), "position_ids": cp.shard(rows, 1)}
            equal(cp, model(**cut, use_cache=False).logits.detach(), exact)


def test_documents_as_long_as_chunks(ranks):
    ranks(2, as_long_as_chunks)


def test_masks_are_those_of_the_model(ranks):
    ranks(2, masked)


def test_a_mask_function_is_understood_or_refused():
    from transformers import masking_utils as masks

    from megatron.context_parallel.integration.transformers_mask import mask_of

    places = packed_in(3, 2)
    documents = masks.find_packed_sequence_indices(places)

    def packed(function, *overlays):
        """As transformers composes it."""
        parts = [masks.remap_positions_for_packed_sequence(function, places), *overlays]
        return masks.and_masks(
            masks.or_masks(*parts) if overlays else parts[0], masks.packed_sequence_mask_function(documents)
        )

    window = masks.sliding_window_causal_mask_function(5)
    causal = masks.causal_mask_function
    for function, expected in (
        (causal, Mask()),
        (masks.bidirectional_mask_function, Mask(causal=False)),
        (window, Mask(True, (4, -1))),
        (packed(window), Mask(True, (4, -1))),
        (masks.and_masks(packed(causal), window), Mask(True, (4, -1))),
        (masks.sliding_window_bidirectional_mask_function(5), Mask(False, (5, 5))),
        (masks.or_masks(window, masks.sliding_window_bidirectional_overlay(4)), Mask(False, (4, 4))),
        (masks.or_masks(causal, lambda *_: torch.tensor(True)), Mask(causal=False)),
        (lambda b, h, q, k: (k <= q + 2) & (k >= q), Mask(False, (0, 2))),
    ):
        assert mask_of(function) == expected
    for function, name in (
        (masks.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)), "chunked_overlay"),
        (packed(causal, masks.blockwise_overlay(places)), "blockwise_overlay"),
        (masks.or_masks(causal, lambda b, h, q, k: k < 3), "test_a_mask_function"),
        (lambda b, h, q, k: k <= q if b == 0 else k >= q, "test_a_mask_function"),
        (lambda b, h, q, k: k < q, "test_a_mask_function"),
        (lambda b, h, q, k: (k == q) | (k < q - 3), "test_a_mask_function"),
    ):
        with pytest.raises(UsageError, match=f"attention mask of {name}"):
            mask_of(function)


def test_a_model_that_computes_with_its_mask_is_refused():
    from megatron.context_parallel.integration.transformers import _mask

    mask = _mask(mask_function=lambda *_: True)
    for use in (lambda: mask.ndim, lambda: torch.zeros(1) + mask, lambda: mask + 1, lambda: mask[:, :, :, :2]):
        with pytest.raises(UsageError, match="attention mask: the model computes with it"):
            use()
    assert not hasattr(mask, "to") and mask[:, :, 0:, :] is mask


def copies(kind: str) -> list[str]:
    """What a copy of a registered model says, before and after it is registered."""
    from megatron.context_parallel.integration.transformers import register, shard_batch

    model, cp = model_of("llama"), ContextParallel("ring")
    register(cp, model)
    copied = deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
    given = shard_batch(cp, batch()) | {"use_cache": False}
    expected = model(**given).loss
    with pytest.raises(UsageError) as caught:
        copied(**given)
    register(cp, copied)
    assert torch.equal(copied(**given).loss, expected)
    return [str(caught.value)]


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_of_a_model_must_be_registered(ranks, kind):
    for said in ranks(2, copies, kind):
        assert said == ["LlamaForCausalLM: a copy of a model that was registered; call register(cp, model)"]


@pytest.mark.parametrize(
    ("adapter", "options", "why"),
    [
        ("LilyConfig", {}, "peft's LILY: computes across the tokens"),
        ("ShadowConfig", {}, "peft's SHADOW: computes across the tokens"),
        ("LoraConfig", {"alora_invocation_tokens": [7]}, "alora_invocation_tokens: looked for among the tokens of a"),
        ("LoraConfig", {"layer_replication": [[0, 2], [0, 2]]}, "layer_replication: copied layers keep the attention"),
        ("LoraConfig", {"velora_config": {"num_groups": 4}}, "velora_config: its projection is the mean over the toke"),
        ("PromptTuningConfig", {"num_virtual_tokens": 4}, "peft's PROMPT_TUNING: adds tokens or keys to those of"),
        ("LoraConfig", {"velora_config": {"num_groups": 4, "init_type": "random"}}, None),
        ("LoraConfig", {}, None),
    ],
)
def test_an_adapter_that_mixes_tokens_is_refused(adapter, options, why):
    peft = pytest.importorskip("peft", reason="needs the package peft")
    from megatron.context_parallel.integration.transformers import register
    from megatron.context_parallel.integration.transformers_model import check_adapters

    model = model_of("llama")
    adapted = peft.get_peft_model(model, getattr(peft, adapter)(task_type="CAUSAL_LM", **options))
    if why is None:
        check_adapters(adapted)
        return
    with pytest.raises(UsageError, match=why):
        register(SimpleNamespace(), adapted)
    if adapter != "PromptTuningConfig":  # only the wrapper knows that one
        with pytest.raises(UsageError, match=why):
            check_adapters(model)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("RobertaForCausalLM", {"is_decoder": True}, "derives positions from padding tokens"),
        (
            "BartForCausalLM",
            {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4},
            "does not accept position_ids",
        ),
        ("LlamaForSequenceClassification", {}, "does not have the next-token loss"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "has layers of type conv"),
        ("JambaForCausalLM", {"num_experts": 1}, "has layers"),
        ("BloomForCausalLM", {}, "does not support other attention functions"),
        ("T5GemmaForConditionalGeneration", {}, "has an encoder and a decoder"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ("LlamaForCausalLM", {}, None),
    ],
)
def test_a_model_that_shares_more_than_attention_is_refused(kind, changes, why):
    from megatron.context_parallel.integration.transformers_model import check_model

    class_ = getattr(transformers, kind)
    sizes = {} if "T5" in kind else {"is_decoder": False, **SIZES, **HEADS}
    with torch.device("meta"):
        model = class_(class_.config_class(**sizes | changes))
    name = model.config._attn_implementation if kind != "BloomForCausalLM" else "context_parallel"
    if why is None:
        check_model(model, name)
        return
    with pytest.raises(UsageError, match=f"{kind}: .*{why}"):
        check_model(model, name)


def made_up(model, tokens: torch.Tensor) -> None:
    """Missing positions with contiguous chunks: they look like one document for each rank."""
    from megatron.context_parallel.integration.transformers import register

    ring = ContextParallel("ring")
    try:
        register(ContextParallel("ring", "contiguous"), model)
        model(input_ids=tokens)
    finally:
        register(ring, model)


def left_to_accelerate(model, **named) -> None:
    """The hooks of accelerate's own context parallelism remove masks."""
    taken = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, given: (args, given | {"attention_mask": None}), with_kwargs=True
    )
    try:
        model(**named)
    finally:
        taken.remove()


def mistakes() -> list[str]:
    """The error of each wrong use."""
    from megatron.context_parallel.integration.transformers import register, shard_batch

    cp, model, data = ContextParallel("ring"), model_of("llama"), batch()
    register(cp, model)
    cut = shard_batch(cp, data)
    tokens, places = cut["input_ids"], cut["position_ids"]
    padding = torch.ones_like(data["input_ids"])
    padding[0, -3:] = 0
    tail = data["labels"].clone()
    tail[0, -3:] = 5
    shifted = torch.nn.functional.pad(data["labels"][:, 1:], (0, 1), value=-100)
    unknown = model_of("llama")
    unknown.config._attn_implementation = "context_parallel"  # as `from_pretrained` does
    named = {"input_ids": tokens, "position_ids": places}
    uses = {
        "labels": lambda: model(input_ids=tokens, position_ids=places, labels=tokens),
        "positions": lambda: model(input_ids=tokens, position_ids=torch.arange(tokens.shape[1]).expand_as(tokens)),
        "made up": lambda: made_up(model, tokens),
        "mask": lambda: model(input_ids=tokens, position_ids=places, attention_mask=padding[:, -tokens.shape[1] :]),
        "left": lambda: shard_batch(cp, {**data, "attention_mask": padding.flip(1)}),
        "padding": lambda: shard_batch(cp, {**data, "labels": tail, "attention_mask": padding}),
        "cache": lambda: model(input_ids=tokens, position_ids=places, past_key_values=transformers.DynamicCache()),
        "length": lambda: shard_batch(cp, {"input_ids": data["input_ids"][:, :-1]}),
        "unknown": lambda: shard_batch(cp, {**data, "token_type_ids": padding}),
        "weights": lambda: model(input_ids=tokens, position_ids=places, output_attentions=True),
        "whole labels": lambda: model(**{**cut, "labels": shifted, "shift_labels": shifted}),
        "images": lambda: model(**named, pixel_values=[padding[:, :5]]),
        "count": lambda: model(**named, labels=cut["labels"], shift_labels=cut["labels"]),
        "not named": lambda: model(tokens, None, places, None, None, tokens),
        "router": lambda: model(**named, output_router_logits=True),
        "kept": lambda: model.generate(tokens, position_ids=places, max_new_tokens=1, use_cache=False),
        "weights of scores": lambda: model(**named, use_cache=False, indices=tokens),
        "accelerate": lambda: left_to_accelerate(model, **named),
        "not registered": lambda: unknown(**named, labels=tokens),
    }
    said = []
    for name, use in uses.items():
        with pytest.raises(UsageError) as caught:
            use()
        said.append(f"{name}: {caught.value}")
    return said


def test_wrong_uses_are_told(ranks):
    for said in ranks(2, mistakes):
        for line, expected in zip(
            said,
            (
                "labels: labels without shift_labels: labels must be shifted before they are sharded; give model(",
                "positions: position_ids: not the positions of this rank's tokens; give model(",
                "made up: position_ids: missing, and transformers' default would be wrong; give model(",
                "mask: attention_mask: a rank's part is not enough; give the whole mask to shard_batch",
                "left: attention_mask: padding before a token; pad on the right",
                "padding: labels: padding tokens have labels; give them -100",
                "cache: past_key_values: caches are not supported under context parallelism; give model(",
                "length: ",
                "unknown: batch: token_type_ids is not supported; give only attention_mask, input_ids",
                "weights: output_attentions: attention weights are never stored; leave it out",
                "whole labels: labels [2, 48] for input_ids [2, 24]: not sharded; give model(",
                "images: pixel_values [2, 5] for input_ids [2, 24]: not sharded; images and audio are not supported, g",
                "count: num_items_in_batch: missing; ranks differ in the number of labels; give model(",
                "not named: 6 positional inputs: give each by name; give model(",
                "router: output_router_logits: the load balancing loss would cover only a rank's tokens; give ",
                "kept: logits_to_keep: it would apply to a rank's own tokens; leave it out",
                "weights of scores: LlamaAttention: passes indices to its attention, which is not supported",
                "accelerate: LlamaAttention: has no mask from transformers; with accelerate call use_context_",
                "not registered: LlamaAttention: the batches of its model are not checked; call register(cp, model)",
            ),
            strict=True,
        ):
            assert line.startswith(expected) and "\n" not in line


def test_accelerate_with_fsdp2_equals_one_rank(ranks):
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    for family, first in (("llama", False), ("mistral", True)):  # accelerate refuses windows, for its own ring
        (expected,) = ranks(1, train, family, None)
        for losses in ranks(4, accelerated, family, "ring", first):
            assert losses == pytest.approx(expected, abs=1e-6)


def test_accelerate_makes_buffers_whole_again():
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    from megatron.context_parallel.integration.accelerate import _cut

    cp = SimpleNamespace(shard=lambda x, dim: x.narrow(dim, 2, 2))
    data = torch.arange(10).view(2, 5)
    before = data.clone()
    inputs, labels, kept = data[:, :-1], data[:, 1:], torch.arange(4)[None]  # views of one another
    given = {"buffers": [inputs, labels, kept], "buffer_seq_dims": [1] * 3, "no_restore_buffers": {kept}}
    with pytest.raises(ZeroDivisionError), _cut(cp, **given):
        assert inputs.tolist() == [[2, 3], [7, 8]] and labels.tolist() == [[3, 4], [8, 9]] and kept.tolist() == [[2, 3]]
        raise ZeroDivisionError
    assert torch.equal(data, before) and torch.equal(inputs, before[:, :-1]) and torch.equal(labels, before[:, 1:])
    data += 1
    assert torch.equal(inputs, data[:, :-1]) and kept.tolist() == [[2, 3]]


def finetuned(*flags: str) -> list[float]:
    from examples.huggingface import finetune

    return finetune.main([*flags, "--seq-length", "128", "--steps", "6", "--lr", "0.01"])


def test_the_example_trains_as_one_rank(ranks):
    (expected,) = ranks(1, finetuned, "--cp-strategy", "ring")
    assert expected[-1] < expected[0] - 0.5
    for losses in ranks(4, finetuned, "--cp-strategy", "mesh"):
        assert losses == pytest.approx(expected, abs=2e-5)


def test_the_models_of_examples_fit_the_kernels_of_a_gpu(tmp_path):
    from examples.huggingface import finetune, small_llama

    small_llama.main(str(tmp_path))
    for config in (finetune.load(None, 128).config, transformers.AutoConfig.from_pretrained(tmp_path)):
        check_backend("auto", torch.float32, config.head_dim, device="cuda", on_this_host=False)
