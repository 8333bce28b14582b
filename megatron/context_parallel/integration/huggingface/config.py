"""A Llama's config.json of HuggingFace as arguments of Megatron."""

import json
from pathlib import Path
from typing import Any

from ...errors import UsageError

_SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}


def is_huggingface(folder: str | Path) -> bool:
    """Whether a folder has a config.json, as those of HuggingFace do and runs of the trainer do not."""
    return (Path(folder) / "config.json").is_file()


def model_flags(folder: Path) -> dict[str, Any]:
    """The trainer's flags that describe the Llama in `folder`, by field.

    Raises:
        UsageError: config.json cannot be read, is of another family, or asks for what GPTModel does not compute.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); copy it again") from None
    try:
        return _flags(config, path)
    except KeyError as missing:
        raise UsageError(f"{path}: has no {missing.args[0]}; copy it again") from None


def _flags(config: dict[str, Any], path: Path) -> dict[str, Any]:
    _check(config, path)
    heads = config["num_attention_heads"]
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise UsageError(f"{path}: dtype {dtype}; weights in {', '.join(_DTYPES)} are read")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "group_query_attention": True,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 1,
        **_rope(config, path),
        **_DTYPES[dtype],
    }


def _check(config: dict[str, Any], path: Path) -> None:
    computed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, value in computed.items():
        if config.get(name, value) != value:
            raise UsageError(f"{path}: {name} {config[name]}; only Llama models with {name} {value} are read")
    if "model_type" not in config:
        raise UsageError(f"{path}: no model_type; only Llama models are read")
    if config.get("quantization_config"):
        raise UsageError(f"{path}: quantization_config; only weights that are not quantized are read")


def _rope(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Base and scaling; transformers 5 has both in `rope_parameters`, earlier releases in two places."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if base != int(base):
        raise UsageError(f"{path}: rope_theta {base}; only whole numbers are read")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"{path}: partial_rotary_factor {rope['partial_rotary_factor']}; only 1.0 is read")
    if kind == "default":
        return {"rotary_base": int(base)}
    if kind != "llama3":
        raise UsageError(f"{path}: rope_type {kind}; only default and llama3 are read")
    for name, value in _SCALED.items():
        if rope[name] != value:
            raise UsageError(f"{path}: {name} {rope[name]} of rope_type llama3; megatron-core computes {value} alone")
    return {"rotary_base": int(base), "use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
