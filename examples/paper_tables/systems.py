"""The attention of each paper as specs of this project's strategies, and the choice of the planner."""

from collections.abc import Iterator, Mapping, Sequence

from megatron.context_parallel.cluster.search.candidates import Workload
from megatron.context_parallel.cluster.search.plainness import plainest
from megatron.context_parallel.cluster.search.planner import GroupDevices, Prediction, fastest, search
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import divisors
from megatron.context_parallel.plan.ir import RANK_PLACEMENTS, Plan
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.layout import Chunks

SIMULATED = 8  # choices of each system, the likeliest
SEARCHED = 16  # of all strategies
RING = "ring"


def specs(paper: str, n: int, heads: int) -> Iterator[str]:
    """All that the paper describes for n ranks: its grids, tiles, sizes and placements."""
    if paper == "attention2d":
        for rows in divisors(n):
            yield from (f"attention2d:grid={rows}x{n // rows},layout=cyclic,overlap={o}" for o in ("yes", "no"))
    elif paper == "mesh_attention":
        for a in divisors(n):
            yield from (f"mesh:grid={a}x{n // a},layout=cyclic,q_transfer_blocks={cost}" for cost in (0.25, 1))
    elif paper == "lightseq":
        yield "lightseq"
    elif paper == "cp_inference":
        yield RING  # pass-KV; the paper has no backward pass
    else:
        yield from _loongtrain(n, heads)


def _loongtrain(n: int, heads: int) -> Iterator[str]:
    """2D-Attention with every size, placement and inner ring."""
    for hp in divisors(n):
        if heads % hp:
            continue
        for placement in RANK_PLACEMENTS[: 1 + (1 < hp < n)]:
            common = f"head_parallel_size={hp},placement={placement}"
            if hp == n:
                yield "ulysses"
                continue
            yield f"ring:{common}" if hp > 1 else RING
            yield from (
                f"loongtrain:{common if hp > 1 else 'head_parallel_size=1'},inner_ring_size={w}"
                for w in divisors(n // hp)[1:-1]
            )


def plans_of(names: Iterator[str], workload: Workload, n: int) -> Mapping[str, Sequence[Plan]]:
    """The forward and the backward plan of each spec that fits the ranks and the sequence."""
    found = dict[str, Sequence[Plan]]()
    for spec in names:
        try:
            choice = parse_spec(spec, n)
            steps = choice.plan(n).n
            visible_pairs = workload.mask.pairs(*Chunks.pair(choice.layout, steps, workload.length))
            found[spec] = [
                choice.plan(
                    n, visible_pairs=visible_pairs, backward=b, heads=workload.heads, kv_heads=workload.kv_heads
                )
                for b in (False, True)
            ]
        except UsageError:
            continue  # a size that the heads or the ranks do not have
    return found


def best_of(paper: str, workload: Workload, place: GroupDevices, passes: int = 2) -> tuple[str, float]:
    """The fastest choice of a paper's system, and the seconds of its forward pass, or of both, by prediction."""
    ranked, _ = fastest(plans_of(specs(paper, place.n, workload.heads), workload, place.n), place, workload, SIMULATED)
    return min(_seconds(ranked, passes).items(), key=lambda item: item[1])


def best_of_all(workload: Workload, place: GroupDevices, passes: int = 2) -> tuple[str, float]:
    """The choice of `--cp-strategy auto`; for one pass, the same rule for the simulated ones."""
    seconds = _seconds(search(workload, place, max_simulated=SEARCHED).ranked, passes)
    best = plainest(seconds)
    return best, seconds[best]


def _seconds(ranked: Mapping[str, Prediction], passes: int) -> dict[str, float]:
    seconds = {}
    for spec, found in ranked.items():
        seconds[spec] = sum(of.seconds for of in found.passes[:passes])
    return seconds
