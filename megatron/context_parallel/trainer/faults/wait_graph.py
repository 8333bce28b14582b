"""Who waits for whom, and who is to blame: pure data."""

from collections.abc import Collection, Mapping

import networkx

from megatron.context_parallel.runtime.comm.flight_recorder import Position, named

_TOLD = 4  # ranks of a line


def wait_graph(positions: Mapping[int, Position]) -> networkx.DiGraph:
    """An edge from each rank to each rank that it waits for.

    A rank in a collective waits for those of its ranks that are not in it too.
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from(positions)
    for rank, position in positions.items():
        if not position.waits:
            continue
        kind, channel, ranks = position.waits
        for other in ranks:
            theirs = positions[other].waits if other in positions else None
            together = theirs and (kind, channel) == theirs[:2] and {rank, *ranks} == {other, *theirs[2]}
            if kind in ("receive", "send") or not together:
                graph.add_edge(rank, other)
    return graph


def culprits(positions: Mapping[int, Position], stopped: Collection[int] = ()) -> list[int]:
    """The ranks that the others wait for, in order: those that do not wait themselves, or that wait for each other.

    Args:
        positions: of all ranks.
        stopped: ranks that do not run; what they wait for does not matter.
    """
    graph = wait_graph({rank: Position() if rank in stopped else at for rank, at in positions.items()})
    knots = networkx.condensation(graph)
    ends = [set(knots.nodes[knot]["members"]) for knot in knots if not knots.out_degree(knot)]
    awaited = []
    for ranks in ends:
        if any(graph.pred[rank] for rank in ranks):
            awaited.append(ranks)
    # Nobody waits for a rank at the end of no chain: if others are waited for, it is only busy.
    return sorted(set().union(*(awaited or ends)))


def chains(positions: Mapping[int, Position], stopped: Collection[int] = ()) -> list[list[int]]:
    """For each rank that waits and that no other waits for, the chain from it to a culprit or around a circle.

    Ranks that are only on circles begin chains too, until each rank that waits is in a chain.
    """
    graph = wait_graph({rank: Position() if rank in stopped else at for rank, at in positions.items()})
    blamed = set(culprits(positions, stopped))
    found: list[list[int]] = []
    seen: set[int] = set()
    for rank in sorted(graph, key=lambda rank: (graph.in_degree(rank) > 0, rank)):
        if rank in seen or not graph.succ[rank]:
            continue
        chain = [rank]
        while graph.succ[chain[-1]] and chain[-1] not in chain[:-1]:
            chain.append(_next(graph, chain[-1], blamed))
        seen.update(chain)
        found.append(chain)
    return found


def _next(graph: networkx.DiGraph, rank: int, blamed: set[int]) -> int:
    """The neighbour of `rank` that is nearest to a culprit."""
    distances = networkx.multi_source_dijkstra_path_length(graph.reverse(copy=False), blamed, weight=None)
    return min(graph.succ[rank], key=lambda other: (distances.get(other, len(graph)), other))


def describe_culprits(ranks: list[int], positions: Mapping[int, Position]) -> str:
    """What is wrong with the culprits of a hang, in one line."""
    each = [f"rank {rank} at {positions[rank]}" for rank in ranks[:_TOLD]]
    each += ["..."] * (len(ranks) > _TOLD)
    if len(ranks) == 1:
        return f"rank {ranks[0]} makes no progress at {positions[ranks[0]]}"
    waiting = all(positions[rank].waits for rank in ranks)
    what = "wait for each other" if waiting else "make no progress"
    return f"{named(ranks[:_TOLD])}{' ...' * (len(ranks) > _TOLD)} {what}: {'; '.join(each)}"
