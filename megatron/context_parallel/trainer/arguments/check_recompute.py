"""Rejects flags of recomputation that would have no effect, or do not work together."""

from collections.abc import Iterator

from megatron.context_parallel.cli.flag_checks import refusal
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import Arguments


def check_recompute(args: Arguments) -> Iterator[UsageError]:
    """The errors about `--recompute-...` that the declarations of the flags cannot express."""
    if args.recompute_granularity == "full" and not (args.recompute_method and args.recompute_num_layers):
        why = "needs --recompute-method and --recompute-num-layers"
        yield refusal(args, "recompute_granularity", why, recompute_method="uniform", recompute_num_layers=1)
    yield from _check_whitelist(args, args.recompute_whitelist or [])
    if args.recompute_modules:
        yield from _check_modules(args, args.recompute_modules)


def _check_whitelist(args: Arguments, names: list[str]) -> Iterator[UsageError]:
    for name in names:
        if name != "core_attention" and args.transformer_impl == "transformer_engine":
            why = "keeps outputs of megatron-core's own layers, not of Transformer Engine's"
            yield UsageError(f"--recompute-whitelist {name}: {why}; give --transformer-impl local")
        elif name in ("fc1", "fc2") and args.mlp_chunks_for_training > 1:
            why = f"--mlp-chunks-for-training {args.mlp_chunks_for_training} computes the MLP again; leave one out"
            yield UsageError(f"--recompute-whitelist {name}: {why}")


def _check_modules(args: Arguments, modules: list[str]) -> Iterator[UsageError]:
    name = "recompute_modules"
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
