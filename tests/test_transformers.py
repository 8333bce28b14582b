"""Models of HuggingFace transformers with our attention: losses and gradients of one rank with its own."""

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import ContextParallel, UsageError

transformers = pytest.importorskip("transformers", reason="needs the extra [tokenizers]")

LENGTH, BATCH, VOCABULARY, STEPS = 48, 2, 64, 5
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 3.0, "sliding_window": 13, "query_pre_attn_scalar": 8}),
}


def model_of(family: str):
    name, extra = FAMILIES[family]
    torch.manual_seed(11)
    config = getattr(transformers, name)(**SIZES, **HEADS, **extra)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch(kind: str = "whole") -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH))
    labels = tokens.masked_fill(torch.rand(BATCH, LENGTH) < 0.2, -100)
    if kind == "whole":
        return {"input_ids": tokens, "labels": labels}
    if kind == "padded":
        mask = torch.arange(LENGTH) < torch.tensor([[LENGTH // 2], [LENGTH - 1]])
        return {"input_ids": tokens, "labels": labels.masked_fill(~mask, -100), "attention_mask": mask.long()}
    places = torch.cat([torch.arange(n) for n in (5, 1, 30, 12)])
    return {"input_ids": tokens, "labels": labels, "position_ids": places.expand(BATCH, -1)}


def train(family: str, spec: str | None, kind: str = "whole", lora: bool = False) -> list[float]:
    """Losses of five steps of SGD; without a strategy, on one rank with the model's own attention."""
    model, data = model_of(family), batch(kind)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    if spec:
        from megatron.context_parallel.integration.transformers import register, shard_batch

        cp = ContextParallel(spec)
        if lora:
            register(cp, model)
        else:
            register(cp)
            model.set_attn_implementation("context_parallel")
        data = shard_batch(cp, data)
    losses = []
    for _ in range(STEPS):
        loss = model(**data, use_cache=False).loss
        loss.backward()
        for tensor in (loss.detach(), *(p.grad for p in trained)):
            if spec:
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("family", "specs", "kind"),
    [
        ("llama", ["mesh", "lightseq", "ulysses"], "whole"),
        ("llama", ["ring", "attention2d"], "packed"),
        ("llama", ["ring:layout=contiguous", "mesh"], "padded"),
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


def test_lora_equals_one_rank(ranks):
    pytest.importorskip("peft", reason="needs the package peft")
    (expected,) = ranks(1, train, "llama", None, "whole", True)
    for losses in ranks(4, train, "llama", "mesh", "whole", True):
        assert losses == pytest.approx(expected, abs=1e-6)
    assert abs(expected[-1] - expected[0]) > 0.01  # the adapters were trained


def made_up(model, tokens: torch.Tensor) -> None:
    """Positions forgotten where chunks are contiguous: they look like a document for each rank."""
    from megatron.context_parallel.integration.transformers import register

    ring = ContextParallel("ring")
    try:
        register(ContextParallel("ring", "contiguous"), model)
        model(input_ids=tokens)
    finally:
        register(ring, model)


def mistakes() -> list[str]:
    """What is said of each wrong use."""
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
        "positions": lambda: model(input_ids=tokens),
        "made up": lambda: made_up(model, tokens),
        "mask": lambda: model(input_ids=tokens, position_ids=places, attention_mask=padding[:, -tokens.shape[1] :]),
        "left": lambda: shard_batch(cp, {**data, "attention_mask": padding.flip(1)}),
        "padding": lambda: shard_batch(cp, {**data, "labels": tail, "attention_mask": padding}),
        "cache": lambda: model(input_ids=tokens, position_ids=places, past_key_values=transformers.DynamicCache()),
        "length": lambda: shard_batch(cp, {"input_ids": data["input_ids"][:, :-1]}),
        "unknown": lambda: shard_batch(cp, {**data, "token_type_ids": padding}),
        "weights": lambda: model(input_ids=tokens, position_ids=places, output_attentions=True),
        "whole labels": lambda: model(**{**cut, "labels": shifted, "shift_labels": shifted}),
        "count": lambda: model(**named, labels=cut["labels"], shift_labels=cut["labels"]),
        "not named": lambda: model(tokens, None, places, None, None, tokens),
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
                "labels: labels without shift_labels: they must be shifted before they are cut; give model(",
                "positions: position_ids: they are not those of this rank's tokens; give model(",
                "made up: position_ids: they are not those of this rank's tokens; give model(",
                "mask: attention_mask: a rank's part tells too little; give the whole mask to shard_batch",
                "left: attention_mask: padding before a token; pad on the right",
                "padding: labels: padding has some; give -100 there",
                "cache: past_key_values: there is no cache under context parallelism; give model(",
                "length: ",
                "unknown: batch: token_type_ids is unknown; there is attention_mask, input_ids",
                "weights: output_attentions: the weights are never stored; leave it out",
                "whole labels: labels [2, 48] beside input_ids [2, 24]: not cut; give model(",
                "count: num_items_in_batch: missing; ranks have different numbers of labels; give model(",
                "not named: 6 inputs without a name: give each by name; give model(",
                "not registered: LlamaAttention: of a model whose batches nobody checks; call register(cp, model)",
            ),
            strict=True,
        ):
            assert line.startswith(expected) and "\n" not in line


def accelerated(family: str, spec: str) -> list[float]:
    """The same steps by accelerate: FSDP2 over 2 data x 2 context ranks, a sample for each data rank."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from megatron.context_parallel.integration.accelerate import use_context_parallel

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # it refuses FSDP2 on CPUs
    parallelism = ParallelismConfig(dp_shard_size=2, cp_size=2)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism, fsdp_plugin=plugin)
    model = model_of(family)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    use_context_parallel(accelerator, spec, model)
    data = batch()
    tokens = (data["labels"][:, 1:] != -100).sum() / dist.get_world_size()
    mine = accelerator.torch_device_mesh["dp_shard"].get_local_rank()
    losses = []
    for _ in range(STEPS):
        inputs = data["input_ids"][mine : mine + 1].clone()
        labels = torch.nn.functional.pad(data["labels"][mine : mine + 1, 1:], (0, 1), value=-100)
        places = torch.arange(LENGTH)[None]
        with accelerator.maybe_context_parallel([inputs, labels, places], [1, 1, 1], {inputs, places}):
            batched = {"input_ids": inputs, "position_ids": places, "labels": labels, "shift_labels": labels}
            loss = model(**batched, num_items_in_batch=tokens, use_cache=False).loss
            accelerator.backward(loss)
        assert labels.shape[1] == LENGTH
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def test_accelerate_with_fsdp2_equals_one_rank(ranks):
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    (expected,) = ranks(1, train, "llama", None)
    for losses in ranks(4, accelerated, "llama", "ring"):
        assert losses == pytest.approx(expected, abs=1e-6)


def finetuned(*flags: str) -> list[float]:
    from examples.huggingface import finetune

    return finetune.main([*flags, "--seq-length", "128", "--steps", "6", "--lr", "0.01"])


def test_the_example_trains_as_one_rank(ranks):
    (expected,) = ranks(1, finetuned, "--cp-strategy", "ring")
    assert expected[-1] < expected[0] - 0.5
    for losses in ranks(4, finetuned, "--cp-strategy", "mesh"):
        assert losses == pytest.approx(expected, abs=2e-5)
