"""The rotary embedding of a HuggingFace config.json as the trainer's flags, and back."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.context_parallel.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OF_KIND = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", *_LLAMA3},
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    },
}
_NO_MODEL_HAS = {"partial_rotary_factor": 1.0}


def rope_flags(config: "PreTrainedConfig", path: Path) -> dict[str, Any]:
    """The flags, by field, of the rotary embedding that transformers read from `path`.

    Raises:
        UsageError: a kind of RoPE, or a parameter of it, that GPTModel lacks.
    """
    rope: dict[str, Any] = config.rope_parameters
    if "full_attention" not in rope:
        return _flags_of(rope, config.max_position_embeddings, path)
    windows = rope["sliding_attention"]
    if windows["rope_type"] != "default":
        raise UsageError(f"{path}: rope_type {windows['rope_type']} of layers with a window; use default")
    base = _flags_of(windows, 0, path)["rotary_base"]
    flags = _flags_of(rope["full_attention"], config.max_position_embeddings, path)
    if flags.get("position_embedding_type") == "yarn":
        raise UsageError(f"{path}: rope_type yarn of layers without a window; use default or linear")
    windowed = "sliding_attention" in config.layer_types
    return flags | ({"rotary_base_of_windows": base} if windowed else {})


def _flags_of(rope: dict[str, Any], longest: int, path: Path) -> dict[str, Any]:
    base, kind = rope.get("rope_theta"), rope.get("rope_type")
    if not isinstance(base, int | float) or base != int(base):
        raise UsageError(f"{path}: rope_theta {base} is not supported; use an integer")
    if kind not in _OF_KIND:
        raise UsageError(f"{path}: rope_type {kind} is not supported; use one of {', '.join(_OF_KIND)}")
    for name, value in rope.items():
        if name in _NO_MODEL_HAS and value != _NO_MODEL_HAS[name]:
            raise UsageError(f"{path}: {name} {value} is not supported; use {_NO_MODEL_HAS[name]}")
        known = name in {"rope_theta", "rope_type", "type", *_NO_MODEL_HAS, *_OF_KIND[kind]}
        if not known and value is not None:
            raise UsageError(f"{path}: {name} {value} of rope_type {kind} is not supported; remove it")
    flags: dict[str, Any] = {"rotary_base": int(base)}
    if kind == "default":
        return flags
    factor = rope.get("factor")
    if factor is None and kind == "yarn" and rope.get("original_max_position_embeddings"):
        factor = longest / rope["original_max_position_embeddings"]
    if not isinstance(factor, int | float):
        raise UsageError(f"{path}: factor {factor} of rope_type {kind}; give a number, such as 8.0")
    if kind == "linear":
        return flags | {"rotary_seq_len_interpolation_factor": float(factor)}
    if kind == "yarn":
        return flags | _yarn_flags(rope, float(factor), path)
    for name, value in _LLAMA3.items():
        if rope.get(name) != value:
            raise UsageError(
                f"{path}: {name} {rope.get(name)} of rope_type llama3; megatron-core supports only {value}"
            )
    return flags | {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}


def _yarn_flags(rope: dict[str, Any], factor: float, path: Path) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings")
    if type(original) is not int:
        raise UsageError(f"{path}: original_max_position_embeddings {original} of rope_type yarn; give a whole number")
    flags: dict[str, Any] = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }
    attention = rope.get("attention_factor")
    if attention is not None:
        if attention < 1 or (factor <= 1 and attention != 1):
            raise UsageError(f"{path}: attention_factor {attention} of rope_type yarn; megatron-core needs 1 or more")
        return flags | {"mscale": (attention - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0}
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        flags |= {name: float(rope[name]) for name in ("mscale", "mscale_all_dim")}
    return flags


def rope_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of config.json for the trainer's flags: the inverse of `rope_flags`."""
    scaling: dict[str, Any] | None = None
    if flags["use_rope_scaling"]:
        scaling = {"rope_type": "llama3", "factor": flags["rope_scaling_factor"], **_LLAMA3}
    elif flags["rotary_seq_len_interpolation_factor"] != 1:
        scaling = {"rope_type": "linear", "factor": flags["rotary_seq_len_interpolation_factor"]}
    elif flags["position_embedding_type"] == "yarn":
        scaling = _yarn_fields(flags)
    return {"rope_theta": float(flags["rotary_base"]), "rope_scaling": scaling}


def _yarn_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    factor, scale, over = flags["rotary_scaling_factor"], flags["mscale"], flags["mscale_all_dim"]
    fields: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": flags["yarn_original_max_position_embeddings"],
        "beta_fast": flags["yarn_beta_fast"],
        "beta_slow": flags["yarn_beta_slow"],
        "truncate": flags["yarn_correction_range_round_to_int"],
    }
    if over:
        fields |= {"mscale": scale, "mscale_all_dim": over}
    elif scale != 1:
        fields["attention_factor"] = 0.1 * scale * math.log(factor) + 1
    return fields
