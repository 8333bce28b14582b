"""Reads the model of a Megatron-Bridge recipe: the run_config.yaml that Bridge writes, or a recipe's `to_yaml`."""

from pathlib import Path
from typing import Any

from megatron.context_parallel.errors import UsageError

ENDINGS = (".yaml", ".yml")
FAMILIES = ("gpt_provider", "llama", "qwen", "mistral")  # modules of megatron.bridge.models
SAME = (  # fields that are flags of the trainer
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "normalization",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "position_embedding_type",
    "window_attn_skip_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "make_vocab_size_divisible_by",
)
ONLY = {  # what else a model may have would change its time or memory
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "is_hybrid_model": False,
    "heterogeneous_block_specs": False,
    "experimental_attention_variant": None,
    "linear_attention_type": None,
    "attention_output_gate": False,
    "moe_layer_freq": 1,
    "softmax_type": "vanilla",
    "fp32_residual_connection": False,
}
POSITIONS = ("rope", "yarn", "learned_absolute")


def is_recipe(path: str | Path) -> bool:
    """Whether a path names a YAML file that exists."""
    return Path(path).suffix in ENDINGS and Path(path).is_file()


def recipe_flags(path: Path) -> dict[str, Any]:
    """The trainer's flags that describe the sizes of a recipe's model, by field. They say nothing of its weights.

    Raises:
        UsageError: no YAML, no model that is described in full, or one that the trainer cannot build.
    """
    model = _model(path)
    for name, value in ONLY.items():
        if (given := model.get(name, value)) not in (value, None):
            raise UsageError(f"{path}: model.{name} {given} is not supported; use a model with {name} {value}")
    if missing := [name for name in (*SAME[:4], "vocab_size", "gated_linear_unit") if model.get(name) is None]:
        why = "is missing; give the run_config.yaml of a run, which has all fields"
        raise UsageError(f"{path}: model.{missing[0]} {why}")
    heads = model["num_attention_heads"]
    flags = {name: model[name] for name in SAME if model.get(name) is not None}
    flags |= {
        "kv_channels": model.get("kv_channels") or model["hidden_size"] // heads,
        "group_query_attention": True,
        "num_query_groups": model.get("num_query_groups") or heads,
        "num_experts": model.get("num_moe_experts"),
        "swiglu": _gated(model, path),
        "untie_embeddings_and_output_weights": not model.get("share_embeddings_and_output_weights", True),
        "vocab_size": model["vocab_size"],
    }
    if not model.get("should_pad_vocab", False):
        flags["make_vocab_size_divisible_by"] = 1
    if (kind := model.get("position_embedding_type", "learned_absolute")) not in POSITIONS:
        raise UsageError(f"{path}: model.position_embedding_type {kind} is not supported; use {', '.join(POSITIONS)}")
    if (window := model.get("window_size")) is not None:
        if not (isinstance(window, list) and len(window) == 2 and all(type(side) is int for side in window)):
            raise UsageError(f"{path}: model.window_size {window} cannot be read; give two numbers, such as [4095, 0]")
        flags["window_size"] = tuple(window)
    return flags


def _model(path: Path) -> dict[str, Any]:
    """The section of the model."""
    import yaml

    try:
        given = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not YAML ({str(error).splitlines()[0]}); copy it again") from None
    model = given.get("model") if isinstance(given, dict) else None
    if not (isinstance(model, dict) and isinstance(target := model.get("_target_"), str)):
        raise UsageError(f"{path}: no model._target_; give the run_config.yaml of a Megatron-Bridge run")
    family = target.removeprefix("megatron.bridge.models.").split(".")[0]
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(f"{path}: model._target_ {target} is not supported; use a model of megatron.bridge: {known}")
    return model


def _gated(model: dict[str, Any], path: Path) -> bool:
    """Whether the MLP is a gated linear unit."""
    activation = model.get("activation_func")
    name = str(activation.get("_target_") if isinstance(activation, dict) else activation).split(".")[-1]
    gated = bool(model["gated_linear_unit"])
    if name not in (("silu",) if gated else ("gelu",)):
        kind = "gated " if gated else ""
        raise UsageError(f"{path}: model.activation_func {name} ({kind}MLP) is not supported; use gated silu, or gelu")
    return gated
