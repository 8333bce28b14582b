"""The `--cp-...` flags: those of the context group, and one for each option that strategies declare."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.kernels.names import BACKENDS
from megatron.context_parallel.strategies import AUTO, COMMON, STRATEGIES, Grid, Option
from megatron.context_parallel.strategies.by_layer import BOTH, COMM_TYPES

_STRATEGY = f"""distributed attention: {", ".join(STRATEGIES)}; NAME:OPTION=VALUE,... sets options;
MODULE:NAME and FILE.py:NAME are strategies of your own; SPEC+SPEC gives forward and backward pass; SPEC*4,SPEC*2 gives
4 layers and then 2; {AUTO} chooses the strategy with the shortest predicted time"""


class _Group(FlagSection):
    context_parallel_size: int = flag("number of ranks that share each sequence", 1)
    cp_strategy: str = flag(_STRATEGY, derived="ring, or the strategy of --cp-comm-type", unit="SPEC", example="ring")
    cp_comm_type: list[str] | None = flag(
        f"Megatron's names for {', '.join(COMM_TYPES.values())} and usp, for all layers or one for each",
        choices=(*COMM_TYPES, BOTH),
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        f"sizes for --cp-comm-type {BOTH}: ranks that split the heads, and ranks of a ring",
        needs="cp_comm_type",
        example=2,
    )
    cp_cluster: str | None = flag(
        f"preset or .yaml file of the cluster for --cp-strategy {AUTO}, the placement of documents and a dry run",
        derived="measured at start, or nodes of 8 H100 for documents",
        unit="NAME",
        example="dgx-h100",
    )
    cp_place_documents: bool = flag(
        "give each batch its own placement: whole documents on one rank where possible, and equal work on all ranks",
        False,
        needs="reset_attention_mask",
    )
    dynamic_context_parallel: bool = flag(
        "place the documents of a micro batch on all data- and context-parallel ranks, as --cp-place-documents",
        False,
        needs="reset_attention_mask",
    )
    max_seqlen_per_dp_cp_rank: int | None = flag(
        "tokens of a micro batch on each data- and context-parallel rank",
        derived="--micro-batch-size sequences for each data-parallel rank",
        needs="dynamic_context_parallel",
    )
    cp_attention_backend: str = flag("library that computes a rank's blocks of attention", "auto", choices=BACKENDS)


def strategy_options() -> dict[str, Option]:
    """The options of all strategies by name. Strategies with the same option share a flag with all their help texts."""
    found = dict(COMMON)
    for strategy in STRATEGIES.values():
        for name, option in strategy.options.items():
            told = f"{strategy.name}: {option.help}"
            if name in found:
                first = found[name]  # each strategy checks its own choices
                choices = (*first.choices, *option.choices) if first.choices and option.choices else ()
                found[name] = replace(first, help=f"{first.help}; {told}", choices=tuple(dict.fromkeys(choices)))
            else:
                found[name] = replace(option, help=told)
    return found


STRATEGY_OPTIONS = strategy_options()


def _declared(option: Option) -> Any:
    unit = {int: "N", Grid: "RxC"}.get(option.kind, "FILE" if option.read else "")
    formerly = f"cp_{option.formerly}" if option.formerly else ""
    return flag(option.help, unit=unit, example=option.example, choices=option.choices, formerly=formerly)


if TYPE_CHECKING:

    class ContextParallel(_Group):
        cp_layout: str | None = flag("")
        cp_partials_in_16_bits: bool | None = flag("")

else:
    # Values stay text until the strategy is known, which parses them; switches are True and False.
    _types = {f"cp_{name}": (bool if option.kind is bool else str) | None for name, option in STRATEGY_OPTIONS.items()}
    _fields = {f"cp_{name}": _declared(option) for name, option in STRATEGY_OPTIONS.items()}
    _about = "ranks that share a sequence, strategies and their options"
    _body = {"__annotations__": _types, "__module__": __name__, "__doc__": _about, **_fields}
    ContextParallel = type("ContextParallel", (_Group,), _body, title="context parallel")
