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
    if args.recompute_modules:
        yield from _check_modules(args, args.recompute_modules)


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
