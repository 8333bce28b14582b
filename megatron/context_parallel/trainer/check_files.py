"""Checks on what the arguments name on disk: data, checkpoints and the directory to save in. Nothing is written."""

import json
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType
from megatron.core.datasets.utils import get_blend_from_list

from ..errors import UsageError
from .check_values import flag, refuse
from .checkpoint import TRACKER, iteration_directory, latest_iteration

_DATA_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_MAKE_DATA = "make it with: python tools/preprocess_data.py --input FILES --output-prefix PREFIX --append-eod"
_INDEX_START = 34  # bytes: magic 9, version 8, dtype code 1, sequence count 8, document count 8
_TOKENS_CHECKED = 1 << 20
# What decides the shape or the meaning of the weights.
_SAME_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "normalization",
    "norm_epsilon",
    "qk_layernorm",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "vocab_size",
)


def check_files(args: Namespace, vocabulary: int) -> None:
    """Refuse data and checkpoints that are missing, damaged or of another tokenizer (of `vocabulary` tokens) or model.

    Raises:
        UsageError: one line that names the flag and the file.
    """
    given = [name for name in _DATA_FLAGS if getattr(args, name)]
    if not given and not args.dry_run:
        raise UsageError(f"--data-path: missing; give the prefix of .bin/.idx files, or {_MAKE_DATA}")
    for name in given:
        for prefix in _prefixes(args, name):
            _check_data(args, name, prefix, vocabulary)
    if args.save:
        _check_writable(args)
    if args.load:
        _check_checkpoint(args)


# ------------------------------------------------------------------------------------------------------- data


def _prefixes(args: Namespace, name: str) -> list[str]:
    prefixes, weights = get_blend_from_list(getattr(args, name))
    numbers = [prefix for prefix in prefixes if prefix.replace(".", "", 1).isdecimal()]
    if numbers or (weights and min(weights) <= 0):
        refuse(args, name, f"each prefix takes a weight above 0, or none does; give {flag(name)} 0.7 FIRST 0.3 SECOND")
    return prefixes


def _check_data(args: Namespace, name: str, prefix: str, vocabulary: int) -> None:
    for suffix in (".idx", ".bin"):
        path = Path(prefix + suffix)
        if not path.is_file():
            whole = prefix.endswith((".idx", ".bin"))
            remedy = f"leave out the suffix, {flag(name)} {prefix[:-4]}" if whole else _MAKE_DATA
            raise UsageError(f"{flag(name)} {prefix}: there is no {path.name} in {path.parent}; {remedy}")
    try:
        tokens = _tokens(Path(prefix + ".idx"), Path(prefix + ".bin"))
        made_by = _tokenizer_of(Path(prefix + ".json"))
    except ValueError as error:
        raise UsageError(f"{flag(name)} {prefix}: {error}; {_MAKE_DATA}") from None
    _check_tokenizer(args, f"{flag(name)} {prefix}", made_by, vocabulary)
    if args.reset_attention_mask and not (tokens[:_TOKENS_CHECKED] == args.eod_token).any():
        why = f"{flag(name)} {prefix} has no end-of-document token {args.eod_token} that would tell documents apart"
        refuse(args, "reset_attention_mask", f"{why}; {_MAKE_DATA}")
    largest = int(tokens[:_TOKENS_CHECKED].max())
    if largest >= vocabulary:
        null = args.tokenizer_type == "NullTokenizer"
        why = f"{flag(name)} {prefix} holds token {largest}, and this tokenizer has {vocabulary}"
        remedy = f"--vocab-size {largest + 1}" if null else "the tokenizer that made the data"
        refuse(args, "vocab_size" if null else "tokenizer_type", f"{why}; give {remedy}")


def _tokens(index: Path, data: Path) -> numpy.ndarray:
    """The token ids of a pair of files, mapped into memory.

    Raises:
        ValueError: the index is not one, or the two do not belong together.
    """
    size = index.stat().st_size
    with open(index, "rb") as stream:
        head = stream.read(_INDEX_START)
    if len(head) < _INDEX_START or not head.startswith(_INDEX_HEADER):
        raise ValueError(f"{index.name} is not an index of tokens ({size} bytes)")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    if version != 1 or code not in {kind.value for kind in DType}:
        raise ValueError(f"{index.name} has version {version} and token type {code}, not 1 and 1 to 8")
    wanted = _INDEX_START + 12 * sequences + 8 * documents
    if size != wanted:
        raise ValueError(
            f"{index.name} has {size} bytes where its {sequences} sequences need {wanted}: cut short or damaged"
        )
    if sequences == 0:
        raise ValueError(f"{index.name} holds no sequences")
    lengths = numpy.memmap(index, numpy.int32, "r", _INDEX_START, (sequences,))
    dtype = numpy.dtype(DType.dtype_from_code(code))
    wanted = int(lengths.sum(dtype=numpy.int64)) * dtype.itemsize
    if data.stat().st_size != wanted:
        raise ValueError(f"{data.name} has {data.stat().st_size} bytes where {index.name} tells of {wanted}")
    if wanted == 0:
        raise ValueError(f"{data.name} holds no tokens")
    return numpy.memmap(data, dtype, "r")


def _tokenizer_of(description: Path) -> dict[str, object]:
    """What the .json beside the data tells of its tokenizer; nothing without one.

    Raises:
        ValueError: it is not the .json that tools/preprocess_data.py writes.
    """
    if not description.is_file():
        return {}
    try:
        made_by = json.loads(description.read_text())
        return {key: made_by[key] for key in ("tokenizer_type", "tokenizer_model", "vocab_size")}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{description.name} does not tell of a tokenizer") from None


def _check_tokenizer(args: Namespace, data: str, made_by: dict[str, object], vocabulary: int) -> None:
    """Refuse `data` made by another tokenizer; ids without text (NullTokenizer) may come from any."""
    if not made_by or args.tokenizer_type == "NullTokenizer":
        return
    kind, model, size = made_by.values()
    if kind != args.tokenizer_type:
        refuse(args, "tokenizer_type", f"{data} was made with {kind}; give --tokenizer-type {kind}")
    if size != vocabulary:
        why = f"has {vocabulary} tokens, and {data} was made with {size}"
        refuse(args, "tokenizer_model", f"{why}; give --tokenizer-model {model}")


# ------------------------------------------------------------------------------------------------ checkpoints


def _check_writable(args: Namespace) -> None:
    existing = next(path for path in (Path(args.save).absolute(), *Path(args.save).absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = f"{existing} cannot be written to ({os.strerror(error.errno)})"
        refuse(args, "save", f"{reason}; give a directory of yours, such as --save runs/first")


def _check_checkpoint(args: Namespace) -> None:
    iteration = latest_iteration(args.load)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            why = f"no {TRACKER} there, so no checkpoint"
            refuse(args, "load", f"{why}; give --load DIR of a run, or leave out --exit-on-missing-checkpoint")
        return
    path = iteration_directory(args.load, iteration) / "args.json"
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError):
        why = f"{TRACKER} names iteration {iteration}, but {path.parent.name}/args.json is missing or damaged"
        refuse(args, "load", f"{why}; write an iteration that is complete in {TRACKER}")
    names = list(_SAME_MODEL)
    if args.position_embedding_type == "learned_absolute":
        names.append("max_position_embeddings")
    if not (args.finetune or args.no_load_optim or saved.get("no_save_optim")):
        names.append("use_distributed_optimizer")
    for name in names:
        if name in saved and saved[name] != getattr(args, name):
            _refuse_other_model(args, name, saved[name])


def _refuse_other_model(args: Namespace, name: str, saved: object) -> None:
    here = getattr(args, name)
    if isinstance(saved, bool):
        switch = "--disable-bias-linear" if name == "add_bias_linear" else flag(name)
        wanted = saved != (name == "add_bias_linear")
        raise UsageError(
            f"{switch}: {'not given' if wanted else 'given'}, but the checkpoint in --load {args.load} was saved "
            f"{'with' if wanted else 'without'} it; {'give' if wanted else 'leave out'} {switch}, or another --load"
        )
    raise UsageError(
        f"{flag(name)} {here}: the checkpoint in --load {args.load} was saved with {saved}; "
        f"give {flag(name)} {saved}, or another --load"
    )
