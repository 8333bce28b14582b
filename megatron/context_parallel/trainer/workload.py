"""A run of the trainer in the words of the cost model: its model's sizes, and how it is trained."""

from ..cluster.model import Model
from ..cluster.run import Run
from .arguments import complete_model, padded_vocab_size
from .command_line import read_flags
from .flags import Arguments, Flags
from .tokenizer import vocabulary


def model_of(args: Arguments) -> Model:
    """The sizes of a run's model."""
    return _model(args, args.padded_vocab_size)


def preset_model(preset: str, seq_length: int, tensor_model_parallel_size: int = 1) -> Model:
    """The sizes of a published model (`--preset`), trained on sequences of `seq_length` tokens.

    Raises:
        UsageError: no such preset.
    """
    flags = ["--preset", preset, "--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length)]
    given = read_flags([*flags, "--tensor-model-parallel-size", str(tensor_model_parallel_size)])
    given = complete_model(given)
    return _model(given, padded_vocab_size(given, given.vocab_size or vocabulary(given)[0]))


def _model(flags: Flags, padded: int) -> Model:
    window = flags.window_size[0] if flags.window_size else -1
    return Model(
        num_layers=flags.num_layers,
        hidden_size=flags.hidden_size,
        ffn_hidden_size=flags.ffn_hidden_size,
        num_attention_heads=flags.num_attention_heads,
        num_query_groups=flags.num_query_groups if flags.group_query_attention else flags.num_attention_heads,
        kv_channels=flags.kv_channels,
        padded_vocab_size=padded,
        positions=flags.max_position_embeddings if flags.position_embedding_type == "learned_absolute" else 0,
        window_size=window if window >= 0 else None,
        normalization=flags.normalization,
        softmax_type=flags.softmax_type,
        qk_layernorm=flags.qk_layernorm,
        swiglu=flags.swiglu,
        add_bias_linear=flags.add_bias_linear,
        add_qkv_bias=flags.add_qkv_bias,
        untie_embeddings_and_output_weights=flags.untie_embeddings_and_output_weights,
    )


def run_of(args: Arguments) -> Run:
    """How a run trains its model."""
    return Run(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        cp_strategy=args.cp.spec if args.cp else "ring:layout=contiguous",  # one that fits, until it is chosen
        context_parallel_size=args.context_parallel_size,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel=args.sequence_parallel,
        data_parallel_sharding_strategy="optim" if args.use_distributed_optimizer else "no_shard",
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        recompute_whitelist=bool(args.recompute_whitelist),
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    )
