"""Table 1 of ATTENTION2D as volumes of this project's plans."""

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.volume import received
from megatron.context_parallel.strategies import parse_spec

STRATEGIES = {  # the paper's name: (its cost, a spec)
    "Ring Attention": ("O(N)", "ring"),
    "Lightseq": ("O(N)", "lightseq"),
    "Ulysses": ("O(N / P)", "ulysses"),
    "USP, 2 ranks split the heads": ("O(N)", "usp:head_parallel_size=2"),
    "ATTENTION2D": ("O(N / sqrt(P))", "attention2d:layout=cyclic"),
}
RANKS = (4, 16, 64)
HEADS = 64


def volume_table() -> str:
    """Markdown: what a rank receives at most, forward and backward, causal, in units of N d: a tensor of all tokens."""
    lines = ["| parallelism | the paper, for a head | plan | " + " | ".join(f"P = {n}" for n in RANKS) + " |"]
    lines.append("|---|---|---|" + "---|" * len(RANKS))
    for name, (cost, spec) in STRATEGIES.items():
        lines.append(f"| {name} | {cost} | `{spec}` | {' | '.join(_volume(spec, n) for n in RANKS)} |")
    return "\n".join(lines)


def _volume(spec: str, n: int) -> str:
    """A chunk is 1 / n of the sequence. A dash: the ranks are too few for the spec."""
    try:
        plans = [parse_spec(spec).plan(n, backward=backward, heads=HEADS, kv_heads=HEADS) for backward in (False, True)]
    except UsageError:
        return "-"
    totals = []
    for rank in range(n):
        totals.append(sum(sum(received(plan, rank).values()) for plan in plans))
    return f"{max(totals) / n:.3g}"
