"""Describes a run of the trainer for the cost model: model sizes and training configuration."""

from megatron.context_parallel.cli.flag import fields_given
from megatron.context_parallel.cli.layer_list import chosen_layers
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import SHARDING, TrainConfig
from megatron.context_parallel.strategies import Choice

from .flags import Arguments, Flags


def model_of(args: Arguments) -> ModelShape:
    """The sizes of a run's model."""
    return model_from(args, args.padded_vocab_size)


def model_from(flags: Flags, padded: int) -> ModelShape:
    """The sizes of the model that flags describe, with `padded` rows in its embedding."""
    window = flags.window_size[0] if flags.window_size else -1
    given = fields_given(flags, ModelShape) | {
        "num_query_groups": flags.num_query_groups if flags.group_query_attention else flags.num_attention_heads,
        "padded_vocab_size": padded,
        "positions": flags.max_position_embeddings if flags.position_embedding_type == "learned_absolute" else 0,
        "window_size": window if window >= 0 else None,
        "full_layers": chosen_layers(flags.window_attn_skip_freq, flags.num_layers).count(0),
        "swiglu": flags.swiglu or flags.fast_geglu or flags.quick_geglu,
    }
    return ModelShape(**given)


def run_of(args: Arguments, choice: Choice | None = None) -> TrainConfig:
    """The training configuration of a run, with the strategy `choice` of some layers (default: of the first)."""
    choices, sharding = [choice] if choice else args.cp_layers[:1], _sharding(args)
    given = (
        fields_given(args, TrainConfig)
        | {
            "cp_strategy": choices[0].spec if choices else "ring:layout=contiguous",  # a placeholder until it is chosen
            "data_parallel_sharding_strategy": sharding,
            "overlap_grad_reduce": args.overlap_grad_reduce or sharding in SHARDING[2:],  # as both FSDPs do
            "overlap_param_gather": args.overlap_param_gather or sharding == SHARDING[3],
            "recompute_modules": tuple(args.recompute_modules or ()),
            "recompute_whitelist": tuple(args.recompute_whitelist or ()),
            "offload_modules": tuple(args.offload_modules or ()),
            "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            "implementation": _implementation(args),
        }
    )
    return TrainConfig(**given)


def _implementation(args: Arguments) -> str:
    """That of the device named in the flags, or of this process's."""
    if args.transformer_impl == "transformer_engine":
        return "transformer_engine"
    if args.dry_run and args.cp_cluster:
        return "cpu" if load_cluster(args.cp_cluster, "--cp-cluster").shared_cores else "fused"
    if args.dry_run and args.device_memory:
        return "fused"
    import torch  # commands read the shape of a model before they import it

    return "fused" if torch.cuda.is_available() else "cpu"


def _sharding(args: Arguments) -> str:
    if args.use_torch_fsdp2:
        return "optim_grads_params"
    if args.use_megatron_fsdp:
        return args.data_parallel_sharding_strategy
    return "optim" if args.use_distributed_optimizer else "no_shard"
