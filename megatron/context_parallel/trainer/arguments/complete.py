"""The arguments of a run: where they come from, and what follows from them."""

import math
import os
from dataclasses import replace

from megatron.context_parallel.cli.flag_checks import check_each
from megatron.context_parallel.trainer.config.flags import FLAGS, SPLIT, Arguments, Flags
from megatron.context_parallel.trainer.config.refuse import check_multiple, check_relations, refuse
from megatron.context_parallel.trainer.config.samples import iterations
from megatron.context_parallel.trainer.data.tokenizer import vocabulary

from .check_values import check_rampup, check_together, check_world, ranks_in
from .command_line import read_flags
from .cp_strategy import strategies_given


def parse_args(argv: list[str] | None = None) -> Arguments:
    """The arguments of one run, complete and checked: flags first, then `--config`, then `--preset`, then defaults.

    Reads WORLD_SIZE and RANK (default 1 and 0). With `--dry-run`, what only training needs may be missing.

    Raises:
        UsageError: anything that would not run as asked.
    """
    args, tokens = complete(read_flags(argv))
    from .check_files import check_files

    check_files(args, tokens)
    return args


def complete(given: Flags, tokenizer: tuple[int, int | None] | None = None) -> tuple[Arguments, int]:
    """The arguments that follow from flags, checked but for files of data and checkpoints; tokens of the tokenizer.

    `tokenizer` is its number of tokens and its end-of-document token; default: those of `--tokenizer-type`.

    Raises:
        UsageError: anything that would not run as asked.
    """
    check_each(given, FLAGS, ", or a --preset or --config that has it")
    specs, choices = strategies_given(given)
    needed = given.tensor_model_parallel_size * given.pipeline_model_parallel_size * given.context_parallel_size
    world_size = ranks_in("WORLD_SIZE", needed if given.dry_run else 1)
    check_world(given, world_size, needed)
    import torch  # takes a second, for which a mistake in a flag need not wait

    given = _fill_in_batch(complete_model(given), world_size // needed)
    given = replace(given, cp_strategy=specs, cp_layout=choices[0].layout if choices else given.cp_layout)
    tokens, eod = tokenizer or vocabulary(given)
    given, size = _fill_in_vocabulary(given, tokens)
    layers = given.num_layers // given.pipeline_model_parallel_size
    each = given.num_layers_per_virtual_pipeline_stage
    args = Arguments(
        **vars(given),
        world_size=world_size,
        rank=ranks_in("RANK", 0),
        data_parallel_size=world_size // needed,
        virtual_pipeline_model_parallel_size=layers // each if each and layers > each else None,
        params_dtype=torch.bfloat16 if given.bf16 else torch.float16 if given.fp16 else torch.float32,
        cp_layers=choices,
        eod_token=eod,
        vocabulary=size,
        padded_vocab_size=padded_vocab_size(given, size),
    )
    check_relations(args)
    check_together(args)
    return args, tokens


def padded_vocab_size(given: Flags, vocabulary: int) -> int:
    """Rows of the embedding for a vocabulary."""
    multiple = given.make_vocab_size_divisible_by * given.tensor_model_parallel_size
    return math.ceil(vocabulary / multiple) * multiple


def complete_model(given: Flags) -> Flags:
    """The flags with the sizes of the model that follow from others."""
    if not given.kv_channels:
        check_multiple(given, "hidden_size", "num_attention_heads")
    from megatron.context_parallel.integration.transformer_engine import why_not_importable

    wide = 4 * given.hidden_size
    ffn = given.ffn_hidden_size or (wide * 2 // 3 // 64 * 64 if given.swiglu else wide)
    groups = (given.num_query_groups or 1) if given.group_query_attention else given.num_attention_heads
    local = given.num_experts or why_not_importable()
    selective = "selective" if given.recompute_activations else None
    return replace(
        given,
        kv_channels=given.kv_channels or given.hidden_size // given.num_attention_heads,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=given.moe_ffn_hidden_size or (ffn if given.num_experts else None),
        num_query_groups=groups,
        max_position_embeddings=given.max_position_embeddings or given.seq_length,
        recompute_granularity=given.recompute_granularity or selective,
        use_distributed_optimizer=given.use_distributed_optimizer or given.use_megatron_fsdp,
        transformer_impl=given.transformer_impl or ("local" if local else "transformer_engine"),
    )


def _fill_in_batch(given: Flags, data_parallel_size: int) -> Flags:
    batch = given.global_batch_size or given.micro_batch_size * data_parallel_size
    given = replace(given, global_batch_size=batch)
    if given.rampup_batch_size:
        check_rampup(given, data_parallel_size)
    return replace(
        given,
        train_iters=iterations(given) if given.train_samples else given.train_iters or 0,
        lr=given.lr or 0.0,
        split=given.split or (SPLIT if given.data_path or given.mock_data else None),
        profile_ranks=given.profile_ranks or [0],
        tensorboard_dir=given.tensorboard_dir or (given.save and os.path.join(given.save, "tensorboard")),
    )


def _fill_in_vocabulary(given: Flags, size: int) -> tuple[Flags, int]:
    """The flags with `vocab_size`, unless the tokenizer, of `size` tokens, has its size from there; the vocabulary."""
    if given.tokenizer_type != "NullTokenizer":
        if (given.vocab_size or size) < size:
            refuse(given, "vocab_size", f"the tokenizer has {size} tokens", vocab_size=size)
        size = given.vocab_size or size
        given = replace(given, vocab_size=size)
    return given, size
