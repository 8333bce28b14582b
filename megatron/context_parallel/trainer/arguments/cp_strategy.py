"""The strategy of each layer that the `--cp-...` flags give."""

from typing import Any

from megatron.context_parallel.cli.flag_checks import flag_text
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.strategies import AUTO, COMMON, Choice, choose_by_layer, specs_given
from megatron.context_parallel.trainer.config.context_parallel_flags import STRATEGY_OPTIONS
from megatron.context_parallel.trainer.config.flags import Flags


def strategies_given(args: Flags) -> tuple[str, tuple[Choice, ...]]:
    """The specs that the `--cp-...` flags give, and the strategy of each layer.

    It is empty for "auto", which chooses when sizes are known.

    Raises:
        UsageError: an unknown strategy, an unknown option or value of it, or an unknown cluster.
    """
    given = {name: getattr(args, f"cp_{name}") for name in STRATEGY_OPTIONS}
    types, sizes = args.cp_comm_type, args.hierarchical_context_parallel_sizes
    specs = specs_given(args.cp_strategy, types, sizes, args.context_parallel_size, args.num_layers)
    if args.cp_cluster:
        if specs != AUTO and not (args.cp_place_documents or args.dry_run):
            needs = f"--cp-strategy {AUTO}, --cp-place-documents or --dry-run"
            raise UsageError(f"--cp-cluster {args.cp_cluster}: needs {needs}; add one or leave this out")
        load_cluster(args.cp_cluster, "--cp-cluster")
    if specs != AUTO:
        try:
            return specs, choose_by_layer(specs, args.num_layers, args.context_parallel_size, **given)
        except UsageError as error:
            raise without_types(args, error) from None
    fixed_options(args)
    if own := next((name for name in STRATEGY_OPTIONS if name not in COMMON and given[name] is not None), None):
        raise UsageError(f"{STRATEGY_OPTIONS[own].as_flag(given[own])}: --cp-strategy {AUTO} chooses it; leave it out")
    return AUTO, ()


def without_types(args: Flags, error: UsageError) -> UsageError:
    """An error that recommends `--cp-strategy`: it cannot be given beside Megatron's names for strategies."""
    given = [name for name in ("cp_comm_type", "hierarchical_context_parallel_sizes") if getattr(args, name)]
    if not given or "give --cp-strategy" not in str(error):
        return error
    return UsageError(f"{error}, without {' and '.join(flag_text(args, name) for name in given)}")


def fixed_options(args: Flags) -> dict[str, Any]:
    """The given options that every strategy has. They also apply to `--cp-strategy auto`."""
    given = {name: (option, getattr(args, f"cp_{name}")) for name, option in COMMON.items()}
    return {name: option.parse(text) for name, (option, text) in given.items() if text is not None}
