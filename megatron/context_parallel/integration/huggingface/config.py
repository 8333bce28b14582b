"""Converts a HuggingFace config.json to Megatron's arguments, and back.

transformers' own config object reads it: it has the defaults of each family and supports the fields of earlier
releases. transformers is imported when it is needed.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.context_parallel.cli.layer_list import chosen_layers
from megatron.context_parallel.errors import UsageError

from .families import EVERY_FAMILY_READS, FAMILIES, PLAIN, WITHOUT_EFFECT
from .rope_fields import rope_fields, rope_flags

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}
_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})  # values of a field that changes nothing


def is_huggingface(folder: str | Path) -> bool:
    """Whether a folder has a config.json. HuggingFace models have one, runs of the trainer do not."""
    return (Path(folder) / "config.json").is_file()


def model_flags(folder: Path) -> dict[str, Any]:
    """The trainer's flags that describe the model in `folder`, by field.

    Raises:
        UsageError: config.json cannot be read, is of another family, or needs a feature that GPTModel lacks.
    """
    return _flags_of(read_config(folder), folder / "config.json")


def _flags_of(config: "PreTrainedConfig", path: Path) -> dict[str, Any]:
    _check_fields(config, path)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UsageError(f"{path}: dtype {dtype} is not supported; use one of {', '.join(_DTYPES)}")
    return {
        **PLAIN,
        **FAMILIES[config.model_type].flags,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "group_query_attention": True,
        "num_query_groups": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 1,
        **_window_flags(config, path),
        **rope_flags(config, path),
        **_family_flags(config),
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
    if (family := given.get("model_type")) not in FAMILIES:
        raise UsageError(f"{path}: model_type {family} is not supported; use one of {', '.join(FAMILIES)}")
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


def _check_fields(config: "PreTrainedConfig", path: Path) -> None:
    """Reject a field that the flags do not express, unless its value changes nothing."""
    from transformers import PreTrainedConfig

    family = FAMILIES[config.model_type]
    for name, value in family.fields.items():
        if (given := getattr(config, name)) != value:
            raise UsageError(f"{path}: {name} {given} is not supported; use a {config.model_type} with {name} {value}")
    fields = config.to_dict()
    quantized = fields.pop("quantization_config", None)
    if quantized is not None and (quantized.get("quant_method") != "mxfp4" or config.model_type != "gpt_oss"):
        method = quantized.get("quant_method", "")
        why = "only MXFP4 of gpt_oss is read; use weights that are not quantized"
        raise UsageError(f"{path}: quantization_config {method}: {why}")
    known = {*family.fields, *EVERY_FAMILY_READS, *family.reads, *WITHOUT_EFFECT, *family.ignores}
    known |= PreTrainedConfig().to_dict().keys()
    for name in fields.keys() - known:
        if (given := fields[name]) not in _NOTHING:
            why = f"transformers' {config.model_type} has no such field; remove it if it changes nothing"
            raise UsageError(f"{path}: {name} {str(given)[:60]} is not supported: {why}")


def _window_flags(config: "PreTrainedConfig", path: Path) -> dict[str, Any]:
    """A token sees itself and the `sliding_window` - 1 tokens before it."""
    window: int | None = None
    if config.model_type != "llama":
        window = config.sliding_window
    if window is not None and window < 1:
        raise UsageError(f"{path}: sliding_window {window}: a token would not see itself; give null for no window")
    same = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [same]
    possible = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if not FAMILIES[config.model_type].layer_types:
        possible = {same}
    if others := {*types} - possible:
        of_window = f"with sliding_window {window} use layers that are {' or '.join(sorted(possible))}"
        raise UsageError(f"{path}: layer_types {min(others)} is not supported; {of_window}")
    if window is None or "sliding_attention" not in types:
        return {}
    windows = [int(kind == "sliding_attention") for kind in types]
    skipped = None
    if 0 in windows:
        skipped = str(windows.index(0) + 1)
        if chosen_layers(skipped, len(windows)) != windows:
            skipped = str(windows).replace(" ", "")
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": skipped}


def _family_flags(config: "PreTrainedConfig") -> dict[str, Any]:
    """The flags of fields that one family has."""
    if config.model_type == "gemma3_text":
        return {"softmax_scale": config.query_pre_attn_scalar**-0.5}
    if config.model_type not in ("qwen3_moe", "gpt_oss"):
        return {}
    flags = {"num_experts": config.num_local_experts, "moe_router_topk": config.num_experts_per_tok}
    if config.model_type == "gpt_oss":
        limit = {"activation_func_clamp_value": config.swiglu_limit}
        return flags | limit | {"moe_ffn_hidden_size": config.intermediate_size, "moe_router_pre_softmax": False}
    width = {"moe_ffn_hidden_size": config.moe_intermediate_size}
    return flags | width | {"moe_router_pre_softmax": not config.norm_topk_prob}


def config_of(flags: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """The config.json of the model that the trainer's flags describe, by field: the inverse of `model_flags`.

    Args:
        flags: the complete flags of a run.
        vocabulary: the number of rows of the tables that are tokens.

    Raises:
        UsageError: a flag has a value that no supported HuggingFace family has.
    """
    if flags["window_size"] and flags["window_size"][0] < 0:
        flags = {**flags, "window_size": None}
    family = _closest_family(flags)
    config = _fields_of(family, flags, vocabulary)
    read = _flags_of(_parse(config, Path("config.json")), Path("config.json"))
    if family == "gemma3_text":
        flags = {**flags, "softmax_scale": flags["softmax_scale"] or flags["kv_channels"] ** -0.5}
    for name in [*PLAIN, "moe_ffn_hidden_size", "moe_router_pre_softmax"]:
        given, has = flags.get(name), read.get(name)
        close = isinstance(given, float) and isinstance(has, float) and math.isclose(given, has)
        if (given or None) != (has or None) and not close:
            raise UsageError(f"{name} {given}: no {', '.join(FAMILIES)} model has it; {family}, the closest, has {has}")
    return config


def _closest_family(flags: Mapping[str, Any]) -> str:
    if flags["num_experts"]:
        return "gpt_oss" if flags["quick_geglu"] else "qwen3_moe"
    if flags["sandwich_norm"]:
        return "gemma3_text"
    if flags["add_qkv_bias"]:
        return "qwen2"
    if flags["qk_layernorm"]:
        return "qwen3"
    return "mistral" if flags["window_size"] else "llama"


def _fields_of(family: str, flags: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    dtype = "bfloat16" if flags["bf16"] else "float16" if flags["fp16"] else "float32"
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **FAMILIES[family].fields,
        "num_hidden_layers": flags["num_layers"],
        "hidden_size": flags["hidden_size"],
        "intermediate_size": flags["ffn_hidden_size"],
        "num_attention_heads": flags["num_attention_heads"],
        "num_key_value_heads": flags["num_query_groups"],
        "head_dim": flags["kv_channels"],
        "max_position_embeddings": flags["max_position_embeddings"],
        "rms_norm_eps": flags["norm_epsilon"],
        **rope_fields(flags),
        **_window_fields(family, flags),
        **_fields_of_family(family, flags),
        "tie_word_embeddings": not flags["untie_embeddings_and_output_weights"],
        "vocab_size": vocabulary,
        "dtype": dtype,
        "torch_dtype": dtype,  # for transformers before 4.56
        "use_cache": True,
    }


def _window_fields(family: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    if family == "llama":
        return {}
    window = flags["window_size"]
    fields: dict[str, Any] = {"sliding_window": window[0] + 1 if window else None}
    if "use_sliding_window" in FAMILIES[family].reads:
        fields["use_sliding_window"] = bool(window)
    if FAMILIES[family].layer_types:
        windows = chosen_layers(flags["window_attn_skip_freq"], flags["num_layers"])
        fields["layer_types"] = ["sliding_attention" if window and here else "full_attention" for here in windows]
    return fields


def _fields_of_family(family: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    if family == "gemma3_text":
        scale = flags["softmax_scale"] or flags["kv_channels"] ** -0.5
        base = flags["rotary_base_of_windows"] or flags["rotary_base"]
        return {"query_pre_attn_scalar": round(scale**-2), "rope_local_base_freq": float(base)}
    if family == "qwen3_moe":
        return {
            "num_experts": flags["num_experts"],
            "num_experts_per_tok": flags["moe_router_topk"],
            "moe_intermediate_size": flags["moe_ffn_hidden_size"],
            "norm_topk_prob": not flags["moe_router_pre_softmax"],
        }
    if family == "gpt_oss":
        experts = {"num_local_experts": flags["num_experts"], "num_experts_per_tok": flags["moe_router_topk"]}
        return experts | {"swiglu_limit": flags["activation_func_clamp_value"]}
    return {}
