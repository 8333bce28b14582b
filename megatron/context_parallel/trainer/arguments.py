"""The arguments of a run: where they come from, and what follows from them."""

import argparse
import difflib
import math
import os
import re
from argparse import ArgumentParser, Namespace

import torch

from ..errors import UsageError
from ..strategies import STRATEGIES, find_strategy
from ..strategies.mesh_schedule import load_costs
from . import check_files, check_values
from .flags import build_parser, source_flags
from .presets import read_config, read_preset
from .tokenizer import build_tokenizer

_EXAMPLES = {
    "int": "give a whole number such as 8",
    "float": "give a number such as 0.1",
    "grid": "give two whole numbers such as 2x4",
}


def parse_args(argv: list[str] | None = None) -> Namespace:
    """The arguments of one run, complete and checked: flags first, then `--config`, then `--preset`, then defaults.

    Reads WORLD_SIZE and RANK (default 1 and 0). Attribute names are Megatron's; `world_size`, `rank`,
    `data_parallel_size`, `virtual_pipeline_model_parallel_size`, `params_dtype` (torch.dtype), `padded_vocab_size`,
    `eod_token` (None if the tokenizer has none) and everything that has a derived default are filled in. With
    `--dry-run`, what only training needs may be missing.

    Raises:
        UsageError: anything that would not run as asked.
    """
    args = _parse_sources(argv)
    check_values.check_each(args)
    _fill_in_ranks(args)
    _fill_in_model(args)
    _fill_in_batch(args)
    check_values.check_together(args)
    tokenizer = build_tokenizer(args)
    args.eod_token = tokenizer.eod
    check_values.check_end_token(args)
    _fill_in_vocabulary(args, tokenizer.vocab_size)
    check_files.check_files(args, tokenizer.vocab_size)
    return args


# --------------------------------------------------------------------------------------------------- sources


_TOGGLES = ("cp-overlap", "cp-balance", "cp-prefetch")  # in a file, false means --no-...; other switches just stay off


def _parse_sources(argv: list[str] | None) -> Namespace:
    sources = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    source_flags(sources)
    try:
        given, _ = sources.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(_explain(error)) from None
    parser = build_parser()
    config = _checked(parser, f"--config {given.config}", read_config(given.config)) if given.config else {}
    preset = given.preset or config.get("preset")
    values = _checked(parser, f"--preset {preset}", read_preset(preset)) if preset else {}
    return _parse(parser, argv, _parse(parser, _as_flags(values | config)))


def _checked(parser: ArgumentParser, source: str, values: dict[str, object]) -> dict[str, object]:
    """`values`, if each is a flag with a value that fits; UsageErrors name the `source`."""
    for name, value in values.items():
        if name in ("config", "help"):
            raise UsageError(f"{source}: {name} cannot be in a file; give it on the command line")
        try:
            _parse(parser, _as_flags({name: True if value is False else value}))
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
    return values


def _as_flags(values: dict[str, object]) -> list[str]:
    flags = []
    for name, value in values.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            flags += [f"--{name}"] if value else [f"--no-{name}"] * (name in _TOGGLES)
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


def _parse(parser: ArgumentParser, argv: list[str] | None, onto: Namespace | None = None) -> Namespace:
    """Parse `argv` over the values in `onto`."""
    try:
        args, unknown = parser.parse_known_args(argv, onto)
    except argparse.ArgumentError as error:
        raise UsageError(_explain(error)) from None
    if unknown:
        word = unknown[0].split("=")[0]
        closest = difflib.get_close_matches(word.replace("_", "-"), parser._option_string_actions, 1, cutoff=0.5)
        remedy = f"did you mean {closest[0]}?" if closest else "--help lists the flags, such as --num-layers"
        raise UsageError(f"{word}: unknown {'flag' if word[:1] == '-' else 'word'}; {remedy}")
    return args


def _explain(error: argparse.ArgumentError) -> str:
    flag, message = error.argument_name, error.message
    if "choose from" in message:
        return f"{flag}: {message}"
    if kind := re.match(r"invalid (int|float|grid) value", message):
        return f"{flag}: {message}; {_EXAMPLES[kind[1]]}"
    if message.startswith("ignored explicit argument"):
        return f"{flag}: {message}; it takes no value, write {flag} alone"
    return f"{flag}: {message}; write {flag} VALUE"


# ------------------------------------------------------------------------------------------- derived values


def _fill_in_ranks(args: Namespace) -> None:
    needed = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.world_size = check_values.from_environment("WORLD_SIZE", needed if args.dry_run else 1)
    args.rank = check_values.from_environment("RANK", 0)
    check_values.check_world(args, needed)
    args.data_parallel_size = args.world_size // needed


def _fill_in_model(args: Namespace) -> None:
    if args.kv_channels is None:
        args.kv_channels = check_values.quotient(args, "hidden_size", "num_attention_heads")
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = wide * 2 // 3 // 64 * 64 if args.swiglu else wide
    if not args.group_query_attention:
        check_values.refuse_given(args, "num_query_groups", "needs --group-query-attention; add it")
        args.num_query_groups = args.num_attention_heads
    elif args.num_query_groups is None:
        args.num_query_groups = 1
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    args.cp_layout = args.cp_layout or find_strategy(args.cp_strategy).layouts[0]
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    if args.recompute_activations:
        args.recompute_granularity = args.recompute_granularity or "selective"
    args.virtual_pipeline_model_parallel_size = check_values.virtual_stages(args)
    args.cp_options = cp_options(args)


def cp_options(args: Namespace) -> dict[str, object]:
    """What the `--cp-...` flags say to the strategy, by the names of `Strategy.plan`'s arguments.

    Raises:
        UsageError: a flag the strategy has no use for.
    """
    strategy = find_strategy(args.cp_strategy)
    known = ("head_parallel_size", "placement", *strategy.options)
    options = {}
    for name in (
        "head_parallel_size",
        "placement",
        "grid",
        "overlap",
        "balance",
        "prefetch",
        "inner_ring_size",
        "costs",
    ):
        if (value := getattr(args, f"cp_{name}")) is None:
            continue
        if name not in known:
            fits = " or ".join(other.name for other in STRATEGIES.values() if name in other.options)
            check_values.refuse(args, f"cp_{name}", f"{strategy.name} has no use for it; give --cp-strategy {fits}")
        options[name] = load_costs(value) if name == "costs" else value
    if "kv_ratio" in known:
        options["kv_ratio"] = args.num_query_groups / args.num_attention_heads
    return options


def _fill_in_batch(args: Namespace) -> None:
    step = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or step
    if args.train_samples is not None:
        check_values.check_samples(args)
        args.train_iters = args.train_samples // args.global_batch_size
        args.lr_warmup_iters = args.lr_warmup_samples // args.global_batch_size
        args.lr_decay_iters = args.lr_decay_samples and args.lr_decay_samples // args.global_batch_size
    if args.data_path and args.split is None:
        args.split = "969,30,1"
    if args.save and not args.tensorboard_dir:
        args.tensorboard_dir = os.path.join(args.save, "tensorboard")


def _fill_in_vocabulary(args: Namespace, size: int) -> None:
    """Sets `padded_vocab_size`, and `vocab_size` unless the tokenizer, of `size` tokens, got its size from there."""
    if args.tokenizer_type != "NullTokenizer":
        if args.vocab_size is not None and args.vocab_size < size:
            check_values.refuse(args, "vocab_size", f"the tokenizer has {size} tokens; give --vocab-size {size}")
        size = args.vocab_size = args.vocab_size or size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = math.ceil(size / multiple) * multiple
