"""Whether ranks of a plan do the same, with all ranks and chunks further."""

from collections.abc import Callable, Hashable

from megatron.context_parallel.tokens.shift import Shift

from .ir import Attend, Collective, Comm, Plan, PlanError, Send, Step


def moved_back(
    rank: int, shift: Shift, steps: tuple[Step, ...], look: Callable[[Attend], Hashable] | None = None
) -> list:
    """The steps of a rank with all ranks and chunks moved, so that the rank is its representative.

    Args:
        rank, shift: the rank, and how ranks are moved.
        steps: what it does.
        look: a property of blocks in which ranks that do the same must agree too.
    """
    by = shift.way_back(rank)
    work = list[tuple]()
    for s, step in enumerate(steps):
        for op in step.comm:
            work.append((s, *_moved(op, shift, by)))
        for block in step.attend:
            queries = sorted([shift.moved(chunk, by) for chunk in block.q_chunks])
            keys = sorted([shift.moved(chunk, by) for chunk in block.kv_chunks])
            work.append((s, queries, keys, block.heads, look(block) if look else None))
    return work


def _moved(op: Comm, shift: Shift, by: int) -> tuple:
    if isinstance(op, Collective):
        pairs = zip(op.group, op.chunks, strict=True)
        members = sorted([(shift.moved(r, by), shift.moved(c, by)) for r, c in pairs])
        return type(op), op.tensor, op.channel, members
    return type(op) is Send, op.tensor, op.channel, shift.moved(op.peer, by), shift.moved(op.chunk, by)


def check_period(plan: Plan) -> None:
    """Raises PlanError if a rank does not do what the plan's period says."""
    n, period = plan.n, plan.period
    if period is None or period >= n:
        return
    shift = Shift(n, period, plan.width)
    if not plan.visible_pairs.repeats(shift):
        return
    first = [moved_back(rank, shift, plan.steps[rank]) for rank in range(period)]
    for rank in range(period, n):
        representative = shift.representative(rank)
        if moved_back(rank, shift, plan.steps[rank]) != first[representative]:
            raise PlanError(
                f"rank {rank}: does not do what rank {representative} does, but {plan.name} declares period {period}; "
                "declare the true one, or none"
            )
