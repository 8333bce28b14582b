"""Rejects flags of recomputation and offloading that would have no effect, or do not work together."""

import math
import os
from collections.abc import Iterator

from megatron.context_parallel.cli.flag_checks import refusal
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import Arguments


def check_recompute(args: Arguments) -> Iterator[UsageError]:
    """The errors about `--recompute-...` that the declarations of the flags cannot express."""
    if args.recompute_granularity == "full" and not (args.recompute_method and args.recompute_num_layers):
        why = "needs --recompute-method and --recompute-num-layers"
        yield refusal(args, "recompute_granularity", why, recompute_method="uniform", recompute_num_layers=1)
    elif args.recompute_method == "uniform" and args.recompute_num_layers:
        stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
        layers, each = args.num_layers // stages, args.recompute_num_layers
        if layers % each:
            why = f"does not divide the {layers} layers of a stage, as --recompute-method uniform needs"
            yield refusal(args, "recompute_num_layers", why, recompute_num_layers=math.gcd(layers, each))
    yield from _check_whitelist(args, args.recompute_whitelist or [])
    if args.recompute_modules:
        yield from _check_modules(args, args.recompute_modules)
    if args.offload_modules:
        yield from _check_offloading(args, args.offload_modules)


def _check_whitelist(args: Arguments, names: list[str]) -> Iterator[UsageError]:
    for name in names:
        if name != "core_attention" and args.transformer_impl == "transformer_engine":
            why = "keeps outputs of megatron-core's own layers, not of Transformer Engine's"
            yield UsageError(f"--recompute-whitelist {name}: {why}; give --transformer-impl local")
        elif name in ("fc1", "fc2") and (args.mlp_chunks_for_training or 1) > 1:
            why = f"--mlp-chunks-for-training {args.mlp_chunks_for_training} computes the MLP again; leave one out"
            yield UsageError(f"--recompute-whitelist {name}: {why}")
        elif name == "fc2" and args.num_experts and args.add_bias_linear:
            why = "experts with biases add them to this output in place; leave fc2 out, or give --disable-bias-linear"
            yield UsageError(f"--recompute-whitelist {name}: {why}")


def _check_modules(args: Arguments, modules: list[str]) -> Iterator[UsageError]:
    name = "recompute_modules"
    if args.recompute_granularity == "full":
        yield refusal(args, name, "--recompute-granularity full computes whole layers again; leave it out")
        return
    if args.recompute_granularity != "selective":
        why = "has an effect only with selective recomputation"
        yield refusal(args, name, why, recompute_granularity="selective")
        return
    wrong = {}
    if args.fp8:
        wrong["mlp"] = f"does not work with --fp8-format {args.fp8}", "core_attn"
    if args.num_experts:
        wrong["mlp"] = "each layer has experts instead", "moe"
    else:
        wrong["moe"] = "the layers have no experts", "mlp"
    if not args.moe_shared_expert_intermediate_size:
        wrong["shared_experts"] = "the layers have no shared experts", "core_attn"
    if args.transformer_impl == "transformer_engine":
        wrong["layernorm"] = "Transformer Engine computes norms inside its linear layers", "core_attn"
    for module in modules:
        if module in wrong:
            why, instead = wrong[module]
            yield UsageError(f"--recompute-modules {module}: {why}; give --recompute-modules {instead}")


def _check_offloading(args: Arguments, modules: list[str]) -> Iterator[UsageError]:
    """The errors about megatron-core's own offloading of activations."""
    name = "fine_grained_activation_offloading"
    if args.transformer_impl != "transformer_engine":
        why = "needs a GPU and --transformer-impl transformer_engine; instead of it and --offload-modules"
        full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield refusal(args, name, f"{why} give --offload-checkpoints {full}")
        return
    if not args.dry_run and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1":
        yield refusal(args, name, "needs NVTE_CPU_OFFLOAD_V1=1 in the environment; set it")
    wrong = {}
    if "core_attn" not in modules:
        wrong["attn_proj"] = "its input is also saved by core_attn; give --offload-modules core_attn attn_proj"
    if args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or ["core_attn"]):
        wrong["core_attn"] = "--recompute-modules core_attn computes it again; give --recompute-modules mlp"
    elif args.qk_layernorm:
        wrong["core_attn"] = "would free what --qk-layernorm saves; give --offload-modules qkv_linear"
    for module in modules:
        if module in wrong:
            yield UsageError(f"--offload-modules {module}: {wrong[module]}")
