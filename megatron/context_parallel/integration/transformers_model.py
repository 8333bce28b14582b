"""Rejects models of transformers that mix tokens outside of attention."""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.transformers import attention_of, is_stateful

_LAYERS = {
    "full_attention",
    "sliding_attention",
    "sparse",
    "dense",
}  # types of layers in which only attention mixes tokens
_MIXING_ADAPTERS = ("LILY", "SHADOW")  # the mean over all tokens selects experts; a model beside the model
_LENGTHS = ("dynamic", "longrope")  # rotary embeddings that depend on the number of tokens of a rank


def check_model(model: PreTrainedModel, name: str) -> None:
    """Rejects a model whose attention is not `name`, or that mixes the tokens of a sequence elsewhere.

    Raises:
        UsageError: the message names the feature of the model.
    """
    kind = type(model).__name__
    for why in _reasons(model, name):
        raise UsageError(f"{kind}: {why}")


def _reasons(model: PreTrainedModel, name: str) -> Iterator[str]:
    kind, config = type(model).__name__, model.config.get_text_config()
    if attention_of(model.config) != name or attention_of(config) != name:
        yield "does not support other attention functions; use a model that supports AttentionInterface of transformers"
    if model.config.is_encoder_decoder:
        yield "has an encoder and a decoder; use a decoder-only model"
    if "position_ids" not in signature(type(model).forward).parameters:
        yield "does not accept position_ids, which give the positions of a rank's tokens; use another model"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield "derives positions from padding tokens, which needs the whole sequence; use another model"
    if "For" in kind and not kind.endswith(("ForCausalLM", "ForConditionalGeneration")):
        yield "does not have the next-token loss; use the model ...ForCausalLM"
    if odd := sorted({*(getattr(config, "layer_types", None) or ())} - _LAYERS):
        yield f"has layers of type {odd[0]}; use a model with full_attention and sliding_attention only"
    if is_stateful(model) or any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        yield "has layers with a state or a convolution, which mix tokens of one rank only; use a model without them"
    if long := [kind for kind in _rope_types(config) if kind in _LENGTHS]:
        yield f"rope_type {long[0]} depends on the number of tokens of a rank; give another, such as default or yarn"


def check_adapters(model: torch.nn.Module) -> None:
    """Rejects adapters of peft that compute across the tokens of a sequence, add some, or have another attention.

    `model` is a model of transformers, or peft's wrapper of one, which also knows the adapters that add tokens.

    Raises:
        UsageError: the message names the method.
    """
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            kind = str(adapter.peft_type.value)
            raise UsageError(f"peft's {kind}: adds tokens or keys to those of each rank; use another, such as LoRA")
        if getattr(adapter, "alora_invocation_tokens", None):
            raise UsageError("alora_invocation_tokens: looked for among the tokens of a rank only; leave them out")
        if getattr(adapter, "layer_replication", None):
            raise UsageError("layer_replication: copied layers keep the attention of the model; leave it out")
        velora = getattr(adapter, "velora_config", None)
        if velora and velora.init_type != "random":
            why = "its projection is the mean over the tokens of a rank; give init_type='random'"
            raise UsageError(f"velora_config: {why}")
        if adapter.peft_type in _MIXING_ADAPTERS:
            kind = str(adapter.peft_type.value)
            raise UsageError(f"peft's {kind}: computes across the tokens of a rank only; use another, such as LoRA")


def _rope_types(config: Any) -> set[str]:
    """The rope types of all kinds of layers; some models have several kinds."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(of for of in rope.values() if isinstance(of, dict))]
    return {of["rope_type"] for of in each if "rope_type" in of}
