"""The `--cp-...` flags and what they say to a strategy."""

from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..kernels.choose import BACKENDS
from ..layout import LAYOUTS
from ..plan.ir import PLACEMENTS
from ..strategies import STRATEGIES, find_strategy
from ..strategies.mesh_schedule import load_costs
from .declare import Section, flag, flags_of

if TYPE_CHECKING:
    from .flags import Flags

_NOT_OPTIONS = ("context_parallel_size", "cp_strategy", "cp_layout", "cp_attention_backend")


class ContextParallel(Section, title="context parallel"):
    context_parallel_size: int = flag("ranks that share each sequence", 1)
    cp_strategy: str = flag(f"distributed attention: {', '.join(STRATEGIES)}", "ring", unit="NAME")
    cp_layout: str = flag(
        f"which tokens a rank holds: {', '.join(LAYOUTS)}", derived="the strategy's first choice", unit="NAME"
    )
    cp_head_parallel_size: int | None = flag(
        "ranks that split the heads; the strategy runs on the others", derived="1, with ulysses all"
    )
    cp_placement: str | None = flag(
        "which ranks are neighbours: those that share tokens, or heads", derived="head-first", choices=PLACEMENTS
    )
    cp_grid: tuple[int, int] | None = flag(
        "attention2d: rows x columns; mesh: chunks of a tile", derived="the best", unit="RxC", example="2x4"
    )
    cp_overlap: bool | None = flag("attention2d: rings that overlap with compute, or collectives", derived="overlap")
    cp_balance: bool | None = flag("lightseq: early ranks help late ones under a causal mask", derived="balance")
    cp_prefetch: bool | None = flag("lightseq: communication flies during blocks", derived="prefetch")
    cp_inner_ring_size: int | None = flag("loongtrain: ranks of an inner ring", derived="the most square")
    cp_costs: str | None = flag(
        "mesh: transfer times in blocks, from tools/profile_blocks.py", derived="by size", unit="FILE"
    )
    cp_attention_backend: str = flag("what computes a rank's blocks of attention", "auto", choices=BACKENDS)


def cp_options(args: "Flags") -> dict[str, Any]:
    """What the `--cp-...` flags say to the strategy, by the names of `Strategy.plan`'s arguments.

    Raises:
        UsageError: a flag the strategy has no use for.
    """
    strategy, options = find_strategy(args.cp_strategy), {}
    known = ("head_parallel_size", "placement", *strategy.options)
    for name, own in flags_of(ContextParallel).items():
        option, value = name.removeprefix("cp_"), getattr(args, name)
        if name in _NOT_OPTIONS or value is None:
            continue
        if option not in known:
            fits = " or ".join(other.name for other in STRATEGIES.values() if option in other.options)
            raise UsageError(f"{own.given(value)}: {strategy.name} has no use for it; give --cp-strategy {fits}")
        options[option] = load_costs(value) if option == "costs" else value
    if "kv_ratio" in known:
        options["kv_ratio"] = args.num_query_groups / args.num_attention_heads
    return options
