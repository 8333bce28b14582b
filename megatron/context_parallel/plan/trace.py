"""When everything in a plan happens, on the symbolic machine."""

from collections.abc import Callable
from dataclasses import dataclass

from .form import check_form
from .ir import Attend, Key, Plan, PlanError, Transfer
from .machine import Machine, Span, say_transfer


@dataclass
class Trace:
    """What happened.

    Attributes:
        spans: each block and each batch, with its time.
        finish: when the last of them ends.
        held: for each rank, the contributions that it has at the end, by (tensor, chunk).
    """

    spans: list[Span]
    finish: float
    held: list[dict[Key, int]]


def _pair_cost(attend: Attend, plan: Plan) -> float:
    return sum(1 for _ in attend.pairs(plan.sees))


def _no_cost(transfer: Transfer) -> float:
    return 0.0


def trace(
    plan: Plan,
    block_time: Callable[[Attend, Plan], float] = _pair_cost,
    transfer_time: Callable[[Transfer], float] = _no_cost,
) -> Trace:
    """Runs `plan` on the symbolic machine.

    Args:
        plan: the plan.
        block_time: the time of a block; default: 1 for each pair of chunks that the mask leaves.
        transfer_time: the time of a chunk from sender to receiver, in the same unit; default: 0.

    Raises:
        PlanError: a wrong form (`check_form`), an operation without counterpart or out of order, a deadlock, a chunk
            that is missing or counted twice.
    """
    check_form(plan)
    machine = Machine(plan, block_time, transfer_time)
    running = {r: machine.rank(r) for r in range(plan.n)}
    stuck: dict[int, tuple] = {}
    while running:
        progress = False
        for r, program in list(running.items()):
            if r in stuck and stuck[r][3].done is None:
                continue
            progress = True
            try:
                stuck[r] = next(program)
            except StopIteration:
                del running[r]
                stuck.pop(r, None)
        if not progress:
            raise PlanError(_deadlock(stuck))
    for queue in machine.unmatched.values():
        for transfer in queue:
            if len(transfer.parties) < transfer.parties_needed:
                batch = transfer.parties[0]
                raise PlanError(
                    f"rank {batch.rank}, step {batch.step}: {say_transfer(transfer.label)} has no counterpart"
                )
    finish = max((span.end for span in machine.spans), default=0.0)
    return Trace(machine.spans, finish, machine.held)


def _deadlock(stuck: dict[int, tuple]) -> str:
    r, (_, s, what, batch) = min(stuck.items(), key=lambda item: item[1][3].step)
    others = ", ".join(f"rank {o} at step {w[1]} for {w[2]}" for o, w in stuck.items() if o != r)
    return (
        f"rank {r}, step {s}: waits for ever for {what}, launched in step {batch.step} on channel {batch.channel}; "
        f"also waiting: {others or 'nobody'}"
    )
