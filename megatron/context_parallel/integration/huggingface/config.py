"""Converts a HuggingFace config.json (Llama, Mistral, Qwen3) to Megatron's arguments, and back.

transformers' own config object reads it: it has the defaults of each family and supports the fields of earlier
releases. transformers is imported when it is needed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.context_parallel.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The fields of each family that GPTModel supports, by model_type.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
}
_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}
# Megatron's flags that have the same value for all families.
_SHARED = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "softmax_type": "vanilla",
    "num_experts": None,
}


def is_huggingface(folder: str | Path) -> bool:
    """Whether a folder has a config.json. HuggingFace models have one, runs of the trainer do not."""
    return (Path(folder) / "config.json").is_file()


def model_flags(folder: Path) -> dict[str, Any]:
    """The trainer's flags that describe the model in `folder`, by field.

    Raises:
        UsageError: config.json cannot be read, is of another family, or needs a feature that GPTModel lacks.
    """
    path = folder / "config.json"
    config = read_config(folder)
    family = config.model_type
    _check_family(config, path)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UsageError(f"{path}: dtype {dtype} is not supported; use one of {', '.join(_DTYPES)}")
    return {
        **_SHARED,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.head_dim or config.hidden_size // config.num_attention_heads,
        "group_query_attention": True,
        "num_query_groups": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps,
        "qk_layernorm": family == "qwen3",
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 1,
        **_window(config, path),
        **_rope(config.rope_parameters, path),
        **_DTYPES[dtype],
    }


def read_config(folder: Path) -> "PreTrainedConfig":
    """The config.json of a folder, as transformers reads it.

    Raises:
        UsageError: it cannot be read, or is of another family.
    """
    path = folder / "config.json"
    try:
        given = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); copy it again") from None
    if not isinstance(given, dict):
        raise UsageError(f"{path}: contains no fields; copy it again")
    if (family := given.get("model_type")) not in _FAMILIES:
        raise UsageError(f"{path}: model_type {family} is not supported; use one of {', '.join(_FAMILIES)}")
    return _parse(given, path)


def _parse(given: dict[str, Any], path: Path) -> "PreTrainedConfig":
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
        config.standardize_rope_params()  # models repeat this when more fields are known
    except Exception as error:  # transformers and its validators raise many types
        said = " ".join(str(error).split())
        raise UsageError(f"{path}: rejected by transformers ({said[:200]}); copy it again") from None
    return config


def _check_family(config: "PreTrainedConfig", path: Path) -> None:
    family = config.model_type
    for name, value in _FAMILIES[family].items():
        if getattr(config, name) != value:
            given = getattr(config, name)
            raise UsageError(f"{path}: {name} {given} is not supported; use a {family} with {name} {value}")
    if getattr(config, "quantization_config", None):
        raise UsageError(f"{path}: quantization_config is not supported; use weights that are not quantized")


def _window(config: "PreTrainedConfig", path: Path) -> dict[str, Any]:
    """A token sees itself and the `sliding_window` - 1 tokens before it."""
    window = config.sliding_window if config.model_type == "mistral" else None
    if window is not None and window < 1:
        raise UsageError(f"{path}: sliding_window {window}: a token would not see itself; give null for no window")
    kind = "full_attention" if window is None else "sliding_attention"
    if others := {*(getattr(config, "layer_types", None) or ())} - {kind}:
        raise UsageError(f"{path}: layer_types {min(others)} is not supported; use a model whose layers are all {kind}")
    return {} if window is None else {"window_size": (window - 1, 0)}


def _rope(rope: dict[str, Any], path: Path) -> dict[str, Any]:
    base, kind = rope.get("rope_theta"), rope.get("rope_type")
    if not isinstance(base, int | float) or base != int(base):
        raise UsageError(f"{path}: rope_theta {base} is not supported; use an integer")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"{path}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; use 1.0")
    if kind == "default":
        return {"rotary_base": int(base)}
    if kind != "llama3":
        raise UsageError(f"{path}: rope_type {kind} is not supported; use default or llama3")
    for name, value in _SCALED.items():
        if rope.get(name) != value:
            raise UsageError(
                f"{path}: {name} {rope.get(name)} of rope_type llama3; megatron-core supports only {value}"
            )
    if not isinstance(rope.get("factor"), int | float):
        raise UsageError(f"{path}: factor {rope.get('factor')} of rope_type llama3; give a number, such as 8.0")
    return {"rotary_base": int(base), "use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def config_of(flags: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """The config.json of the model that the trainer's flags describe, by field: the inverse of `model_flags`.

    Args:
        flags: the complete flags of a run.
        vocabulary: the number of rows of the tables that are tokens.

    Raises:
        UsageError: a flag has a value that no supported HuggingFace family has.
    """
    window = flags["window_size"] if flags["window_size"] and flags["window_size"][0] >= 0 else None
    family = "qwen3" if flags["qk_layernorm"] else "mistral" if window else "llama"
    needed = {**_SHARED, "qk_layernorm": False} if window else _SHARED
    for name, value in needed.items():
        if flags[name] != value:
            why = f"no {', '.join(_FAMILIES)} model has it" + " together with a window" * (name == "qk_layernorm")
            raise UsageError(f"{name} {flags[name]}: {why}; all of them have {value}")
    dtype = "bfloat16" if flags["bf16"] else "float16" if flags["fp16"] else "float32"
    scaling = {"rope_type": "llama3", "factor": flags["rope_scaling_factor"], **_SCALED}
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **_FAMILIES[family],
        "num_hidden_layers": flags["num_layers"],
        "hidden_size": flags["hidden_size"],
        "intermediate_size": flags["ffn_hidden_size"],
        "num_attention_heads": flags["num_attention_heads"],
        "num_key_value_heads": flags["num_query_groups"],
        "head_dim": flags["kv_channels"],
        "max_position_embeddings": flags["max_position_embeddings"],
        "rms_norm_eps": flags["norm_epsilon"],
        "rope_theta": float(flags["rotary_base"]),
        "rope_scaling": scaling if flags["use_rope_scaling"] else None,
        **({"sliding_window": window[0] + 1 if window else None} if family != "llama" else {}),
        "tie_word_embeddings": not flags["untie_embeddings_and_output_weights"],
        "vocab_size": vocabulary,
        "dtype": dtype,
        "torch_dtype": dtype,  # for transformers before 4.56
        "use_cache": True,
    }
