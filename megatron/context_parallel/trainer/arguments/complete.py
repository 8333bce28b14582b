"""The arguments of a run: given values, derived values and checks."""

import math
import os
from dataclasses import replace

from megatron.context_parallel.cli.flag_checks import check_each, check_multiple, check_relations, refuse
from megatron.context_parallel.cluster.step.train_config import loss_chunk
from megatron.context_parallel.errors import UsageError, raise_all
from megatron.context_parallel.trainer.config.flags import SPLIT, Arguments, Flags
from megatron.context_parallel.trainer.config.samples import iterations
from megatron.context_parallel.trainer.data.tokenizer import vocabulary

from .check_values import check_rampup, check_together, check_world, ranks_in
from .command_line import read_flags
from .cp_strategy import strategies_given


def parse_args(argv: list[str] | None = None) -> Arguments:
    """The arguments of one run, complete and checked: flags first, then `--config`, then `--preset`, then defaults.

    Reads WORLD_SIZE and RANK (default 1 and 0). With `--dry-run`, flags that only training needs may be missing.

    Raises:
        UsageError: anything that would not run as asked.
    """
    errors = list[UsageError]()
    flags = read_flags(argv, errors)
    try:
        args, tokens = complete(flags)
    except UsageError as error:
        errors.append(error)
    raise_all(errors)
    if args.rank == 0:
        _warn(flags, args)
    from .check_files import check_files

    check_files(args, tokens)
    return args


def _warn(flags: Flags, args: Arguments) -> None:
    """Print how the run differs from the flags given."""
    from megatron.context_parallel.integration.transformer_engine import why_not_importable

    if flags.sequence_parallel and not args.sequence_parallel:
        print("warning: --sequence-parallel is off: --tensor-model-parallel-size is 1", flush=True)
    if args.dry_run and args.fp8 and (why := why_not_importable()):
        print(f"warning: --fp8-format {args.fp8} needs Transformer Engine to train; on this host {why}", flush=True)


def complete(flags: Flags, tokenizer: tuple[int, int | None] | None = None) -> tuple[Arguments, int]:
    """The complete arguments and the tokenizer's number of tokens. Data and checkpoints are not checked.

    `tokenizer` is its number of tokens and its end-of-document token; default: those of `--tokenizer-type`.

    Raises:
        UsageError: anything that would not run as asked.
    """
    if flags.sft or flags.pack_documents:
        flags = replace(flags, reset_attention_mask=True, reset_position_ids=True)
    raise_all(check_each(flags, ", or a --preset or --config that has it"))
    flags = _share_documents(flags)
    specs, choices = strategies_given(flags)
    needed = flags.tensor_model_parallel_size * flags.pipeline_model_parallel_size * flags.context_parallel_size
    world_size = ranks_in("WORLD_SIZE", needed if flags.dry_run else 1)
    check_world(flags, world_size, needed)
    import torch  # takes a second; mistakes in flags are reported before

    flags = _fill_in_batch(complete_model(flags), world_size // needed)
    flags = replace(flags, cp_strategy=specs, cp_layout=choices[0].layout if choices else flags.cp_layout)
    tokens, eod = tokenizer or vocabulary(flags)
    flags, size = _fill_in_vocabulary(flags, tokens)
    padded = padded_vocab_size(flags, size)
    chunk = flags.cross_entropy_chunk_size or loss_chunk(padded // flags.tensor_model_parallel_size)
    flags = replace(flags, cross_entropy_chunk_size=chunk)
    layers = flags.num_layers // flags.pipeline_model_parallel_size
    each = flags.num_layers_per_virtual_pipeline_stage
    args = Arguments(
        **vars(flags),
        world_size=world_size,
        rank=ranks_in("RANK", 0),
        data_parallel_size=world_size // needed,
        virtual_pipeline_model_parallel_size=layers // each if each and layers > each else None,
        params_dtype=torch.bfloat16 if flags.bf16 else torch.float16 if flags.fp16 else torch.float32,
        cp_layers=choices,
        cp_measured=None,
        eod_token=eod,
        vocabulary=size,
        padded_vocab_size=padded,
    )
    raise_all(check_relations(args))
    raise_all(check_together(args))
    return args, tokens


def _share_documents(flags: Flags) -> Flags:
    """With `--dynamic-context-parallel`: the data-parallel ranks join the context group and share its micro batches.

    Raises:
        UsageError: `--max-seqlen-per-dp-cp-rank` does not give whole sequences.
    """
    if not flags.dynamic_context_parallel:
        return flags
    model_ranks = flags.tensor_model_parallel_size * flags.pipeline_model_parallel_size
    data = max(1, ranks_in("WORLD_SIZE", 1) // (model_ranks * flags.context_parallel_size))
    ranks = data * flags.context_parallel_size
    sequences = data * flags.micro_batch_size
    if flags.max_seqlen_per_dp_cp_rank:
        sequences, rest = divmod(ranks * flags.max_seqlen_per_dp_cp_rank, flags.seq_length)
        if rest or not sequences:
            fits = math.ceil(flags.seq_length / ranks)
            why = f"{ranks} ranks have no whole sequences of --seq-length {flags.seq_length}"
            refuse(flags, "max_seqlen_per_dp_cp_rank", why, max_seqlen_per_dp_cp_rank=fits)
    return replace(
        flags,
        context_parallel_size=ranks,
        micro_batch_size=sequences,
        cp_place_documents=flags.reset_attention_mask,
    )


def padded_vocab_size(flags: Flags, vocabulary: int) -> int:
    """Rows of the embedding for a vocabulary."""
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return math.ceil(vocabulary / multiple) * multiple


def complete_model(flags: Flags) -> Flags:
    """The flags, with derived model sizes filled in."""
    if not flags.kv_channels:
        raise_all(check_multiple(flags, "hidden_size", "num_attention_heads"))
    from megatron.context_parallel.integration.transformer_engine import why_not_importable

    wide = 4 * flags.hidden_size
    ffn = flags.ffn_hidden_size or (wide * 2 // 3 // 64 * 64 if flags.swiglu else wide)
    groups = (flags.num_query_groups or 1) if flags.group_query_attention else flags.num_attention_heads
    planned = flags.dry_run and flags.fp8  # for hosts that have Transformer Engine
    own = flags.num_experts or flags.sandwich_norm or flags.rotary_base_of_windows  # layers that only local ones have
    local = own or (not planned and why_not_importable())
    selective = "selective" if flags.recompute_activations else None
    return replace(
        flags,
        kv_channels=flags.kv_channels or flags.hidden_size // flags.num_attention_heads,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=flags.moe_ffn_hidden_size or (ffn if flags.num_experts else None),
        num_query_groups=groups,
        max_position_embeddings=flags.max_position_embeddings or flags.seq_length,
        recompute_granularity=flags.recompute_granularity or selective,
        use_distributed_optimizer=flags.use_distributed_optimizer or flags.use_megatron_fsdp,
        sequence_parallel=flags.sequence_parallel and flags.tensor_model_parallel_size > 1,
        transformer_impl=flags.transformer_impl or ("local" if local else "transformer_engine"),
    )


def _fill_in_batch(flags: Flags, data_parallel_size: int) -> Flags:
    batch = flags.global_batch_size or flags.micro_batch_size * data_parallel_size
    flags = replace(flags, global_batch_size=batch)
    if flags.rampup_batch_size:
        check_rampup(flags, data_parallel_size)
    return replace(
        flags,
        train_iters=iterations(flags) if flags.train_samples else flags.train_iters or 0,
        lr=flags.lr or 0.0,
        split=flags.split or (SPLIT if flags.data_path or flags.mock_data else None),
        profile_ranks=flags.profile_ranks or [0],
        tensorboard_dir=flags.tensorboard_dir or (flags.save and os.path.join(flags.save, "tensorboard")),
    )


def _fill_in_vocabulary(flags: Flags, size: int) -> tuple[Flags, int]:
    """The flags with `vocab_size`, and the vocabulary. `size`: the tokenizer's; NullTokenizer has that of the flag."""
    if flags.tokenizer_type != "NullTokenizer":
        if (flags.vocab_size or size) < size:
            refuse(flags, "vocab_size", f"the tokenizer has {size} tokens", vocab_size=size)
        size = flags.vocab_size or size
        flags = replace(flags, vocab_size=size)
    return flags, size
