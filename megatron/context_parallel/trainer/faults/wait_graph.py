"""Which rank waits for which, and which is to blame. Pure data."""

from collections.abc import Collection, Mapping

import networkx

from megatron.context_parallel.runtime.comm.flight_recorder import Position, named

_TOLD = 4  # ranks named in a line


def wait_graph(positions: Mapping[int, Position]) -> networkx.DiGraph:
    """An edge from each rank to each rank that it waits for.

    A rank in a collective waits for the members that have not entered it.
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
    """The ranks that the others wait for, in order: ranks that do not wait, or that wait for each other.

    Args:
        positions: of all ranks.
        stopped: ranks that do not run; their waits are ignored.
    """
    graph = wait_graph({rank: Position() if rank in stopped else at for rank, at in positions.items()})
    knots = networkx.condensation(graph)
    ends = [set(knots.nodes[knot]["members"]) for knot in knots if not knots.out_degree(knot)]
    awaited = []
    for ranks in ends:
        if any(graph.pred[rank] for rank in ranks):
            awaited.append(ranks)
    # A rank that no other rank waits for is only busy, if other ranks are waited for.
    return sorted(set().union(*(awaited or ends)))


def chains(positions: Mapping[int, Position], stopped: Collection[int] = ()) -> list[list[int]]:
    """For each waiting rank that no other waits for, the chain from it to a culprit or around a cycle.

    Ranks that are only on cycles start chains too, until each waiting rank is in a chain.
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
    """The neighbour of `rank` that is closest to a culprit."""
    distances = networkx.multi_source_dijkstra_path_length(graph.reverse(copy=False), blamed, weight=None)
    return min(graph.succ[rank], key=lambda other: (distances.get(other, len(graph)), other))


def describe_culprits(ranks: list[int], positions: Mapping[int, Position]) -> str:
    """One line about the culprits of a hang."""
    each = [f"rank {rank} at {positions[rank]}" for rank in ranks[:_TOLD]]
    each += ["..."] * (len(ranks) > _TOLD)
    if len(ranks) == 1:
        return f"rank {ranks[0]} makes no progress at {positions[ranks[0]]}"
    waiting = all(positions[rank].waits for rank in ranks)
    what = "wait for each other" if waiting else "make no progress"
    return f"{named(ranks, _TOLD)} {what}: {'; '.join(each)}"
