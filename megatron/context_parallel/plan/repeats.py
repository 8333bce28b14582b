"""Whether ranks of a plan do the same, with all ranks and chunks further."""

from collections.abc import Callable, Hashable

from .ir import AllGather, Attend, Comm, Plan, PlanError, ReduceScatter, Send, Step


def seen_from(rank: int, n: int, steps: tuple[Step, ...], look: Callable[[Attend], Hashable] | None = None) -> list:
    """The steps of a rank with its own number subtracted from all ranks and chunks, modulo n.

    Args:
        rank, n: the rank, and the number of ranks.
        steps: what it does.
        look: a property of blocks in which ranks that do the same must agree too.
    """
    work = list[tuple]()
    for s, step in enumerate(steps):
        for op in step.comm:
            work.append((s, *_turned(op, rank, n)))
        for block in step.attend:
            queries = sorted([(chunk - rank) % n for chunk in block.q_chunks])
            keys = sorted([(chunk - rank) % n for chunk in block.kv_chunks])
            work.append((s, queries, keys, look(block) if look else None))
    return work


def _turned(op: Comm, rank: int, n: int) -> tuple:
    if isinstance(op, AllGather | ReduceScatter):
        members = sorted(((r - rank) % n, (c - rank) % n) for r, c in zip(op.group, op.chunks, strict=True))
        return type(op), op.tensor, op.channel, members
    return type(op) is Send, op.tensor, op.channel, (op.peer - rank) % n, (op.chunk - rank) % n


def check_period(plan: Plan) -> None:
    """Raises PlanError if a rank does not do what the plan's period says."""
    n, period = plan.n, plan.period
    if period is None or not plan.visible_pairs.repeats(period):
        return
    first = [seen_from(rank, n, plan.steps[rank]) for rank in range(min(period, n))]
    for rank in range(period, n):
        if seen_from(rank, n, plan.steps[rank]) != first[rank % period]:
            raise PlanError(
                f"rank {rank}: does not do what rank {rank % period} does, but {plan.name} declares period {period}; "
                "declare the true one, or none"
            )
