"""Models of transformers that the ranks of a context group cannot share by attention alone."""

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
_LENGTHS = ("dynamic", "longrope")  # rotary embeddings that depend on the length of what a rank has


def check_model(model: PreTrainedModel, name: str) -> None:
    """Refuses a model that has not taken the attention `name`, or computes more over all tokens of a sequence.

    Raises:
        UsageError: it says what the model computes.
    """
    kind = type(model).__name__
    for why in _reasons(model, name):
        raise UsageError(f"{kind}: {why}")


def _reasons(model: PreTrainedModel, name: str) -> Iterator[str]:
    kind, config = type(model).__name__, model.config.get_text_config()
    if attention_of(model.config) != name or attention_of(config) != name:
        yield "takes no other attention; use a model that supports AttentionInterface of transformers"
    if model.config.is_encoder_decoder:
        yield "has an encoder and a decoder; use a decoder alone"
    if "position_ids" not in signature(type(model).forward).parameters:
        yield "takes no position_ids, by which a rank would say where its tokens are; use another model"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield "counts positions from its padding token on, which a rank cannot; use another model"
    if "For" in kind and not kind.endswith(("ForCausalLM", "ForConditionalGeneration")):
        yield "has another loss than that of the next token; use the model ...ForCausalLM"
    if odd := sorted({*(getattr(config, "layer_types", None) or ())} - _LAYERS):
        yield f"has layers of type {odd[0]}; only full_attention and sliding_attention are known here"
    if is_stateful(model) or any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        yield "has layers with a state or a convolution, which mix the tokens of a rank alone; use one without"
    if long := [kind for kind in _rope_types(config) if kind in _LENGTHS]:
        yield f"rope_type {long[0]} depends on the length of what a rank has; give another, such as default or yarn"


def _rope_types(config: Any) -> set[str]:
    """Of all kinds of layers; some models have one of each kind."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(of for of in rope.values() if isinstance(of, dict))]
    return {of["rope_type"] for of in each if "rope_type" in of}
