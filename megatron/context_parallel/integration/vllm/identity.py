"""What two programs must have in common, for one to use the keys and values of the other: the model's identity."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

_FILES = 8  # at a time
_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_COMPUTED = ("hidden_act", "hidden_activation", "num_experts_per_tok", "norm_topk_prob", "query_pre_attn_scalar")


def identity(config: Any, dtype: str, folder: Path) -> dict[str, Any]:
    """The facts about a model that decide its keys and values, and a digest of its weights.

    Args:
        config: transformers' config of the model.
        dtype: that of keys and values, such as "bfloat16".
        folder: the HuggingFace folder with the weights.

    Raises:
        ValueError: the folder has no safetensors files, or the config lacks a field.
    """
    facts: dict[str, Any] = {name: getattr(config, name, None) for name in _SHAPE}
    if missing := [name for name, value in facts.items() if value is None]:
        raise ValueError(f"the config of {folder} has no {missing[0]}")
    head_dim = getattr(config, "head_dim", None) or facts["hidden_size"] // facts["num_attention_heads"]
    return {
        "model_type": config.model_type,
        **facts,
        "head_dim": head_dim,
        "norm_epsilon": getattr(config, "rms_norm_eps", None),
        **{name: getattr(config, name, None) for name in _COMPUTED},
        "windows": _windows(config),
        "dtype": dtype,
        "rope": _rope(config),
        "weights": digest_of_weights(folder),
    }


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The first fact in which two identities differ, as "name: ours, theirs"; "" if there is none."""
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            return f"{name}: {ours.get(name)} here, {theirs.get(name)} there"[:300]
    return ""


def digest_of_weights(folder: Path) -> str:
    """A digest of all bytes of the safetensors files of a folder, in hexadecimal.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: has no .safetensors files, whose digest both sides compare")
    try:
        with ThreadPoolExecutor(_FILES) as threads:
            digests = [*threads.map(_digest, files)]
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error})") from None
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, partial(hashlib.blake2b, digest_size=32)).digest()


def _windows(config: Any) -> list[int | None]:
    """The window of each layer; one for all of them if they are alike. None: a token sees all tokens before it."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or [f"{'sliding' if window else 'full'}_attention"]
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return windows if len({*windows}) > 1 else windows[:1]


def _rope(config: Any) -> dict[str, Any]:
    """The parameters of the rotary embedding, in one form for the configs of all releases of transformers."""
    given = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    theta = given.get("rope_theta", getattr(config, "rope_theta", None))
    kind = given.get("rope_type", given.get("type", "default"))
    kept = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": 1.0}
    if kind != "default":
        kept |= given
    kept["partial_rotary_factor"] = given.get("partial_rotary_factor") or 1.0
    kept.pop("type", None)
    return {name: float(x) if type(x) is int else x for name, x in sorted(kept.items())}
