"""Checks the files that the arguments name: data, checkpoints and the directory to save in. Nothing is written."""

import tempfile
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megatron.context_parallel.cli.flag_checks import refuse
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.checkpoint.resume import check_resume
from megatron.context_parallel.trainer.checkpoint.store import (
    TRACKER,
    choose_checkpoint,
    iterations,
    loadable_checkpoints,
    quick_fault,
    read_saved_args,
    saves_where_it_loads,
)
from megatron.context_parallel.trainer.config.flags import FLAGS, Arguments
from megatron.context_parallel.trainer.data.chats import read_chats
from megatron.context_parallel.trainer.data.index_file import open_tokens, tokenizer_of

_DATA_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_MAKE_DATA = "make it with: python tools/preprocess_data.py --input FILES --output-prefix PREFIX --append-eod"
_OF_NCCL = ("cga_cluster_size", "is_high_priority_stream", "max_ctas", "min_ctas", "net_name")
_TOKENS_CHECKED = 1 << 20  # here; each batch is checked when it is made
_CHATS_CHECKED = 100  # here; all chats are checked when they are tokenized, before training


def check_files(args: Arguments, vocabulary: int) -> None:
    """Reject data and checkpoints that are missing, damaged, or made for another tokenizer or model.

    `vocabulary` is the tokenizer's number of tokens.

    Raises:
        UsageError: one line that names the flag and the file.
    """
    given = [name for name in _DATA_FLAGS if getattr(args, name)]
    if not given and not args.mock_data and not args.dry_run:
        raise UsageError(f"--data-path: missing; give the prefix of .bin/.idx files, or {_MAKE_DATA}")
    for name in given:
        for prefix in _prefixes(args, name):
            if args.sft:
                _check_chats(args, prefix)
            else:
                _check_data(args, FLAGS[name].as_flag(prefix), prefix, vocabulary)
    if args.nccl_communicator_config_path:
        _check_communicators(args, Path(args.nccl_communicator_config_path))
    if args.save:
        _check_writable(args, Path(args.save).absolute())
        if not args.skip_train and not saves_where_it_loads(args):
            _check_unused(args, args.save)
    if args.load:
        _check_checkpoint(args, args.load)


# ------------------------------------------------------------------------------------------------------- data


def _prefixes(args: Arguments, name: str) -> list[str]:
    from megatron.core.datasets.utils import get_blend_from_list

    prefixes, weights = get_blend_from_list(getattr(args, name))
    numbers = [prefix for prefix in prefixes if prefix.replace(".", "", 1).isdecimal()]
    if numbers or (weights and min(weights) <= 0):
        refuse(args, name, "give every prefix a weight above 0, or none", **{name: "0.7 FIRST 0.3 SECOND"})
    return prefixes


def _check_data(args: Arguments, given: str, prefix: str, vocabulary: int) -> None:
    for path in (Path(prefix + ".idx"), Path(prefix + ".bin")):
        if not path.is_file():
            remedy = f"leave out the suffix, {given[:-4]}" if prefix.endswith((".idx", ".bin")) else _MAKE_DATA
            raise UsageError(f"{given}: there is no {path.name} in {path.parent}; {remedy}")
    try:
        data = open_tokens(prefix)
        made_by = tokenizer_of(prefix)
    except ValueError as error:
        raise UsageError(f"{given}: {error}; {_MAKE_DATA}") from None
    _check_tokenizer(args, given, made_by, vocabulary)
    if (
        args.reset_attention_mask
        and not args.pack_documents
        and not (data.tokens[:_TOKENS_CHECKED] == args.eod_token).any()
    ):
        why = f"{given} has no end-of-document token {args.eod_token}, so documents cannot be separated"
        refuse(args, "reset_attention_mask", f"{why}; {_MAKE_DATA}")
    if wrong := data.wrong_token(vocabulary, most=_TOKENS_CHECKED):
        why = f"{given} has token {wrong[1]} at index {wrong[0]}, but this tokenizer has {vocabulary} tokens"
        if args.tokenizer_type == "NullTokenizer" and wrong[1] >= 0:
            refuse(args, "vocab_size", why, vocab_size=int(data.tokens[:_TOKENS_CHECKED].max()) + 1)
        refuse(args, "tokenizer_type", f"{why}; give the tokenizer that the data was made with")


def _check_chats(args: Arguments, path: str) -> None:
    """Reject a tokenizer without a chat template, and chats that it does not fit."""
    from megatron.context_parallel.trainer.data.chat_template import ChatTemplate

    assert args.tokenizer_model  # which its tokenizer needs
    checked = None if args.dry_run else _CHATS_CHECKED
    for _ in ChatTemplate(args.tokenizer_model).tokens_of(islice(read_chats(path), checked)):
        pass


def _check_tokenizer(args: Arguments, data: str, made_by: dict[str, Any], vocabulary: int) -> None:
    """Reject `data` made with another tokenizer. Ids without text (NullTokenizer) may come from any tokenizer."""
    if not made_by or args.tokenizer_type == "NullTokenizer":
        return
    kind, model, size = made_by.values()
    if kind != args.tokenizer_type:
        refuse(args, "tokenizer_type", f"{data} was made with {kind}", tokenizer_type=kind)
    if size != vocabulary:
        why = f"has {vocabulary} tokens, but {data}.json names a tokenizer with {size}"
        if model is None:
            refuse(args, "tokenizer_type", f"{why}; {_MAKE_DATA}")
        refuse(args, "tokenizer_model", why, tokenizer_model=model)


def _check_communicators(args: Arguments, path: Path) -> None:
    """Reject names in a file of NCCL options that megatron-core would ignore."""
    import yaml

    groups = FLAGS["high_priority_stream_groups"].choices
    name = "nccl_communicator_config_path"
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        refuse(args, name, f"cannot be read ({' '.join(str(error).split())})")
    if not isinstance(found, dict) or not all(isinstance(options, dict) for options in found.values()):
        refuse(args, name, "must map groups to options, such as {cp: {max_ctas: 16}}")
    for what, known, words in (("group", groups, [*found]), ("option", _OF_NCCL, [*chain(*found.values())])):
        if unknown := [word for word in words if word not in known]:
            refuse(args, name, f"{unknown[0]} is not a supported NCCL {what}; use one of {', '.join(known)}")


# ------------------------------------------------------------------------------------------------ checkpoints


def _check_writable(args: Arguments, directory: Path) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        refuse(args, "save", f"{existing} is not writable ({error.strerror})", save="runs/first")


def _check_unused(args: Arguments, directory: str) -> None:
    """Reject a run that begins anew where another has saved: it would replace checkpoints and cut metrics.jsonl."""
    try:
        there = iterations(directory)
    except UsageError as error:
        raise UsageError(f"--save {error}") from None
    if there:
        why = f"has checkpoints of another run, the last of iteration {there[-1]}"
        refuse(args, "save", f"{why}; give --load {directory} to resume it, or another --save")


def _check_checkpoint(args: Arguments, directory: str) -> None:
    paths, fault = loadable_checkpoints(args)
    if not paths and not fault and args.exit_on_missing_checkpoint:
        why = f"has no {TRACKER}, so there is no checkpoint"
        refuse(args, "load", f"{why}; give the --save directory of a run, or leave out --exit-on-missing-checkpoint")
    if checkpoint := choose_checkpoint(args, paths, fault, quick_fault, say=lambda line: None):  # the load tells
        check_resume(args, read_saved_args(checkpoint))
