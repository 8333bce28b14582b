"""Training a model of HuggingFace transformers, with our attention or on one rank with its own."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.tokens.place_documents import Costs, place
from tests.support.device import DEVICE, head_dim, on_device

transformers = pytest.importorskip("transformers", reason="needs the extra [tokenizers]")

LENGTH, BATCH, VOCABULARY = 48, 2, 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"head_dim": head_dim(8)}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 3.0, "sliding_window": 13, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"use_bidirectional_attention": True, "sliding_window": 12}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 4, "moe_intermediate_size": 16}),
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


def train(
    family: str, spec: str | None, kind: str = "whole", lora: bool = False, placed: bool = False, steps: int = 3
) -> list[float]:
    """Losses of steps of SGD; without a strategy, on one rank with the model's own attention."""
    model, data = model_of(family), on_device(batch(kind))
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    model = on_device(model)
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
        windows = [(-1, -1), (10, 0)]
        data = shard_batch(cp, data, place=partial(place, costs=Costs(1.0), windows=windows) if placed else None)
        if placed:
            assert data["input_ids"].shape == data["labels"].shape == (1, BATCH * LENGTH // cp.n)
    losses = []
    for _ in range(steps):
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


def accelerated(family: str, spec: str, first: bool = False, steps: int = 3) -> list[float]:
    """The same steps by accelerate: FSDP2 over 2 data x 2 context ranks, a sample for each data rank.

    `first`: the attention is ours before accelerate prepares the model.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from megatron.context_parallel.integration.accelerate import use_context_parallel

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=DEVICE == "cpu")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # it refuses FSDP2 on CPUs
    parallelism = ParallelismConfig(dp_shard_size=2, cp_size=2)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=DEVICE == "cpu", parallelism_config=parallelism, fsdp_plugin=plugin)
    model = model_of(family)
    if first:
        use_context_parallel(accelerator, spec, model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if not first:
        use_context_parallel(accelerator, spec, model)
    data = on_device(batch())
    tokens = (data["labels"][:, 1:] != -100).sum() / dist.get_world_size()
    mine = accelerator.torch_device_mesh["dp_shard"].get_local_rank()
    losses = []
    for _ in range(steps):
        inputs = data["input_ids"][mine : mine + 1].clone()
        labels = torch.nn.functional.pad(data["labels"][mine : mine + 1, 1:], (0, 1), value=-100)
        places = on_device(torch.arange(LENGTH))[None]
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
