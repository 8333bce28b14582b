"""From the arguments to megatron-core's objects: model chunks, optimizer, learning-rate schedule."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch import Tensor

from megatron.context_parallel.cli.flag import fields_given
from megatron.context_parallel.cli.layer_list import read_layer_list
from megatron.context_parallel.cluster.step.mlp_chunks import mlp_chunks, recomputed_anyway
from megatron.context_parallel.integration.gemma import scale_embeddings
from megatron.context_parallel.integration.groups import contexts_by_layer
from megatron.context_parallel.integration.host_memory import HostMemory, offload
from megatron.context_parallel.integration.kept_outputs import keep_outputs
from megatron.context_parallel.integration.loss import ModelWithLoss
from megatron.context_parallel.integration.mlp import recompute_mlps
from megatron.context_parallel.integration.model_config import ModelConfig
from megatron.context_parallel.integration.recomputed_outputs import free_outputs
from megatron.context_parallel.integration.rope import use_layout
from megatron.context_parallel.integration.spec import Contexts, block_spec
from megatron.context_parallel.integration.vocabulary import draw_rows, leave_out_padding
from megatron.context_parallel.integration.yarn import use_yarn
from megatron.context_parallel.patches.megatron_gradient_norm import norm_on_device
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.samples import decay_samples, train_samples, warmup_samples
from megatron.context_parallel.trainer.config.workload import model_of, run_of

from .data_parallel import DataParallel, finish_gradients, wrap
from .loss_scale import share_scale
from .shard_optimizer import HostOptimizer, adamw_of_shards
from .torch_fsdp2 import Sharder, shard_when_built


def build_model(args: Arguments) -> list[DataParallel]:
    """This rank's model chunks (one, or one per virtual pipeline stage), ready for gradient reduction."""
    config = transformer_config(args)
    group = parallel_state.get_context_parallel_group()
    cp = contexts_by_layer(args.cp_layers, group)
    chunks = args.virtual_pipeline_model_parallel_size or 1
    virtual = range(chunks) if chunks > 1 else [None]
    sharder = Sharder(args) if args.use_torch_fsdp2 else None
    model = []
    for index, stage in enumerate(virtual):
        model.append(_wrap(args, config, index, build_gpt(args, config, cp, stage, sharder), sharder))
    _synchronise_by(args, config, model)
    return model


def build_gpt(
    args: Arguments,
    config: TransformerConfig,
    cp: Contexts,
    vp_stage: int | None = None,
    sharder: Sharder | None = None,
) -> ModelWithLoss:
    """The GPT model of this pipeline rank's (virtual) stage, with our attention and its layout's RoPE.

    With a `sharder` its layers are sharded.
    """
    whitelist = args.recompute_whitelist or []
    layers = get_num_layers_to_build(config, vp_stage)
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    yarn = args.position_embedding_type == "yarn"
    block = block_spec(config, cp, layers, args.cp_attention_backend, "core_attention" in whitelist)
    if sharder:
        shard_when_built(block.layer_specs[0], sharder)  # all layers have this spec
    model = ModelWithLoss(
        config,
        block,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope" if yarn else args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=_divided_by(args),
        vp_stage=vp_stage,
    )
    if yarn:
        use_yarn(
            model,
            args.rotary_base,
            args.rotary_scaling_factor,
            args.yarn_original_max_position_embeddings,
            args.yarn_beta_fast,
            args.yarn_beta_slow,
            args.yarn_correction_range_round_to_int,
        )
    if args.scale_embeddings and model.pre_process:
        scale_embeddings(model)
    model.chunk_size = args.cross_entropy_chunk_size
    use_layout(model, cp[0] if isinstance(cp, Sequence) else cp)  # all layers have the same layout
    _recompute(args, model)
    keep_outputs(model, whitelist)
    if args.offload_checkpoints or args.offload_kept:
        offload(model, HostMemory(), inputs=args.offload_checkpoints, kept=args.offload_kept)
    leave_out_padding(model, args.vocabulary)
    if config.perform_initialization and model.post_process and args.untie_embeddings_and_output_weights:
        _draw_vocabulary(args, "output layer", model.output_layer.weight)
    return model


def _recompute(args: Arguments, model: GPTModel) -> None:
    """What our recomputation does beside megatron-core's."""
    shape, run = model_of(args), run_of(args)
    if run.recompute_granularity == "full":
        free_outputs(model, (run.recompute_method == "uniform" and run.recompute_num_layers) or 1)
    chunks = mlp_chunks(shape, run)
    if chunks > 1 or "mlp" in run.computed_again:
        recompute_mlps(model, chunks, recomputed_anyway(run))


def _draw_embedding(args: Arguments, weight: Tensor) -> None:
    # megatron-core also uses this to initialize the position table, which every tensor-parallel rank has in full.
    if getattr(weight, "tensor_model_parallel", False):
        _draw_vocabulary(args, "embedding", weight)
    else:
        torch.nn.init.normal_(weight, 0.0, args.init_method_std)


def _draw_vocabulary(args: Arguments, table: str, weight: Tensor) -> None:
    first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    draw_rows(weight, first, args.vocabulary, args.init_method_std, seed=f"{args.seed} {table}")


def _divided_by(args: Arguments) -> float | None:
    return None if args.rotary_seq_len_interpolation_factor == 1 else args.rotary_seq_len_interpolation_factor


def _gate(args: Arguments) -> Callable[[Tensor], Tensor] | None:
    """The activation of gated linear units; None: the MLP is not gated."""
    if args.swiglu:
        return torch.nn.functional.silu
    if args.fast_geglu:
        return partial(torch.nn.functional.gelu, approximate="tanh")
    return _quick_gelu if args.quick_geglu else None


def _has_fused_activation(args: Arguments) -> bool:
    """Whether megatron-core has a kernel for the activation. Of experts it has one for SwiGLU without biases only."""
    if args.num_experts:
        return args.swiglu and not args.add_bias_linear
    return args.swiglu or (not _gate(args) and args.add_bias_linear and args.bias_gelu_fusion)


def _quick_gelu(x: Tensor) -> Tensor:  # megatron-core compiles its own, which needs a C++ compiler
    return x * torch.sigmoid(1.702 * x)


def transformer_config(args: Arguments) -> ModelConfig:
    """The model configuration: all arguments with the name of one of its fields, and derived values."""
    given = fields_given(args, ModelConfig)
    interleaved = bool(args.virtual_pipeline_model_parallel_size)
    gate = _gate(args)
    if gate:
        given.update(gated_linear_unit=True, activation_func=gate)
    if args.window_attn_skip_freq:
        given["window_attn_skip_freq"] = read_layer_list(args.window_attn_skip_freq)
    given.update(
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        yarn_rotary_scaling_factor=args.rotary_scaling_factor,
        yarn_mscale=args.mscale,
        yarn_mscale_all_dim=args.mscale_all_dim,
        num_moe_experts=args.num_experts,
        layernorm_epsilon=args.norm_epsilon,
        cp_comm_type=None,  # each layer has its own strategy
        embedding_init_method=partial(_draw_embedding, args),
        # For an exact loss with any loss mask and layout, it must be divided by the token count of all ranks.
        calculate_per_token_loss=True,
        pipeline_dtype=args.params_dtype,
        deallocate_pipeline_outputs=_frees_outputs(interleaved),
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        # These two fusions are compiled, which needs a GPU or a C++ compiler.
        bias_dropout_fusion=torch.cuda.is_available(),
        bias_activation_fusion=torch.cuda.is_available() and _has_fused_activation(args),
    )
    given.pop("mlp_chunks_for_training", None)  # from 0.18 on megatron-core cuts too, but keeps every part
    if args.recompute_modules:  # of these the MLP is ours
        given["recompute_modules"] = [module for module in args.recompute_modules if module != "mlp"]
    return ModelConfig(**given)


def _frees_outputs(interleaved: bool) -> bool:
    """Whether a stage frees the memory of an output that it has sent, while the backward pass still needs its graph.

    gloo may still read it when the next micro batch starts. NCCL's stream order keeps it alive, but with interleaved
    stages, which do not wait for what they send, torch 2.15's (NCCL2) keeps only the tensor that lost its memory.
    """
    return torch.cuda.is_available() and not (interleaved and hasattr(torch.distributed, "ProcessGroupNCCL2"))


def _wrap(
    args: Arguments, config: TransformerConfig, index: int, gpt: GPTModel, sharder: Sharder | None
) -> DataParallel:
    if torch.cuda.is_available() and not sharder:  # which may have put shards into host memory
        gpt.cuda(torch.cuda.current_device())
    gpt.model_type = ModelType.encoder_or_decoder
    return wrap(args, config, Float16Module(config, gpt) if args.bf16 or args.fp16 else gpt, index, sharder)


def _synchronise_by(args: Arguments, config: TransformerConfig, model: list[DataParallel]) -> None:
    config.finalize_model_grads_func = finish_gradients
    if model[0].ddp_config.overlap_grad_reduce:  # Megatron-FSDP sets it if gradients are sharded
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]


def build_optimizer(args: Arguments, model: list[DataParallel]) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer of these chunks, and the schedule of its learning rate and weight decay (in samples)."""
    # 0 means no limit. With 0, megatron-core does not compute the norm in Megatron-FSDP's optimizer.
    given = fields_given(args, OptimizerConfig) | {"clip_grad": args.clip_grad or math.inf}
    if args.use_torch_fsdp2:  # its weights are already float32
        given |= {"bf16": False, "params_dtype": torch.float32, "optimizer_cpu_offload": False}
    norm_on_device()
    config = OptimizerConfig(**given)
    optimizer = get_megatron_optimizer(config, model, use_gloo_process_groups=False)
    if args.use_torch_fsdp2:
        (part,) = optimizer.chained_optimizers
        part.optimizer = adamw_of_shards(part)
        if args.optimizer_cpu_offload:
            optimizer = HostOptimizer(part.optimizer, part.config, part.init_state_fn)
    if args.fp16:
        share_scale(optimizer)
        model[0].config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_samples(args),
        lr_decay_steps=decay_samples(args) or 1,  # 0 with --skip-train
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=train_samples(args),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler
