"""Checks on what the arguments name on disk: data, checkpoints and the directory to save in. Nothing is written."""

import json
import tempfile
from pathlib import Path
from typing import NoReturn

import numpy

from ..errors import UsageError
from .check_flags import refuse
from .declare import Flag
from .flags import FLAGS, Arguments

_DATA_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_MAKE_DATA = "make it with: python tools/preprocess_data.py --input FILES --output-prefix PREFIX --append-eod"
_INDEX_START = 34  # bytes: magic 9, version 8, dtype code 1, sequence count 8, document count 8
_TOKENS_CHECKED = 1 << 20


def check_files(args: Arguments, vocabulary: int) -> None:
    """Refuse data and checkpoints that are missing, damaged or of another tokenizer (of `vocabulary` tokens) or model.

    Raises:
        UsageError: one line that names the flag and the file.
    """
    given = [name for name in _DATA_FLAGS if getattr(args, name)]
    if not given and not args.dry_run:
        raise UsageError(f"--data-path: missing; give the prefix of .bin/.idx files, or {_MAKE_DATA}")
    for name in given:
        for prefix in _prefixes(args, name):
            _check_data(args, FLAGS[name].given(prefix), prefix, vocabulary)
    if args.save:
        _check_writable(args, Path(args.save).absolute())
    if args.load:
        _check_checkpoint(args, args.load)


# ------------------------------------------------------------------------------------------------------- data


def _prefixes(args: Arguments, name: str) -> list[str]:
    from megatron.core.datasets.utils import get_blend_from_list

    prefixes, weights = get_blend_from_list(getattr(args, name))
    numbers = [prefix for prefix in prefixes if prefix.replace(".", "", 1).isdecimal()]
    if numbers or (weights and min(weights) <= 0):
        refuse(args, name, "each prefix takes a weight above 0, or none does", **{name: "0.7 FIRST 0.3 SECOND"})
    return prefixes


def _check_data(args: Arguments, given: str, prefix: str, vocabulary: int) -> None:
    for path in (Path(prefix + ".idx"), Path(prefix + ".bin")):
        if not path.is_file():
            remedy = f"leave out the suffix, {given[:-4]}" if prefix.endswith((".idx", ".bin")) else _MAKE_DATA
            raise UsageError(f"{given}: there is no {path.name} in {path.parent}; {remedy}")
    try:
        tokens = _tokens(Path(prefix + ".idx"), Path(prefix + ".bin"))
        made_by = _tokenizer_of(Path(prefix + ".json"))
    except ValueError as error:
        raise UsageError(f"{given}: {error}; {_MAKE_DATA}") from None
    _check_tokenizer(args, given, made_by, vocabulary)
    if args.reset_attention_mask and not (tokens[:_TOKENS_CHECKED] == args.eod_token).any():
        why = f"{given} has no end-of-document token {args.eod_token} that would tell documents apart"
        refuse(args, "reset_attention_mask", f"{why}; {_MAKE_DATA}")
    largest = int(tokens[:_TOKENS_CHECKED].max())
    if largest >= vocabulary:
        why = f"{given} holds token {largest}, and this tokenizer has {vocabulary}"
        if args.tokenizer_type == "NullTokenizer":
            refuse(args, "vocab_size", why, vocab_size=largest + 1)
        refuse(args, "tokenizer_type", f"{why}; give the tokenizer that made the data")


def _tokens(index: Path, data: Path) -> numpy.ndarray:
    """The token ids of a pair of files, mapped into memory.

    Raises:
        ValueError: the index is not one, or the two do not belong together.
    """
    from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType

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


def _check_tokenizer(args: Arguments, data: str, made_by: dict[str, object], vocabulary: int) -> None:
    """Refuse `data` made by another tokenizer; ids without text (NullTokenizer) may come from any."""
    if not made_by or args.tokenizer_type == "NullTokenizer":
        return
    kind, model, size = made_by.values()
    if kind != args.tokenizer_type:
        refuse(args, "tokenizer_type", f"{data} was made with {kind}", tokenizer_type=kind)
    if size != vocabulary:
        why = f"has {vocabulary} tokens, and {data} was made with {size}"
        refuse(args, "tokenizer_model", why, tokenizer_model=model)


# ------------------------------------------------------------------------------------------------ checkpoints


def _check_writable(args: Arguments, directory: Path) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        refuse(args, "save", f"{existing} cannot be written to ({error.strerror})", save="runs/first")


def _check_checkpoint(args: Arguments, directory: str) -> None:
    from .checkpoint import TRACKER, iteration_directory, latest_iteration

    iteration = latest_iteration(directory)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            why = f"no {TRACKER} there, so no checkpoint"
            refuse(args, "load", f"{why}; give --load DIR of a run, or leave out --exit-on-missing-checkpoint")
        return
    path = iteration_directory(directory, iteration) / "args.json"
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError):
        why = f"{TRACKER} names iteration {iteration}, but {path.parent.name}/args.json is missing or damaged"
        refuse(args, "load", f"{why}; write an iteration that is complete in {TRACKER}")
    decided = {"weights"}
    if args.position_embedding_type == "learned_absolute":
        decided.add("position table")
    if not (args.finetune or args.no_load_optim or saved.get("no_save_optim")):
        decided.add("optimizer")
    for name, flag in FLAGS.items():
        if flag.decides in decided and name in saved and saved[name] != getattr(args, name):
            _refuse_other_model(args, flag, saved[name])


def _refuse_other_model(args: Arguments, flag: Flag, saved: object) -> NoReturn:
    checkpoint = f"the checkpoint in --load {args.load} was saved"
    if flag.kind is not bool:
        refuse(args, flag.name, f"{checkpoint} with {saved}; give {flag.given(saved)}, or another --load")
    here, there, advice = ("given", "without", "leave out")
    if saved != flag.default:
        here, there, advice = ("not given", "with", "give")
    raise UsageError(f"{flag.option}: {here}, but {checkpoint} {there} it; {advice} {flag.option}, or another --load")
