"""How many bytes a plan brings to each rank, to the last float: what the counters of sockets are compared with."""

from megatron.context_parallel.plan.ir import PARTIAL, Comm, Plan, SwapHeads, T
from megatron.context_parallel.plan.verify import traffic, units

from .cases import DTYPES, Problem

ROW_STATISTICS = {T.O: 1, T.QDO: 2, T.DO: 1}  # log-sum-exp, delta: one float32 per query and head each


def planned_bytes(plans: tuple[Plan, ...], problem: Problem) -> list[int]:
    """Bytes each rank receives in all `plans` of one attention.

    A chunk of s tokens is s · batch · heads · head_dim · itemsize bytes of queries, output gradients, and (kv_heads
    for heads) of keys and of values. Partial results travel in float32; log-sum-exp and delta add 4 bytes per token,
    sample and head each.
    """
    totals = [0.0] * problem.ranks
    for plan in plans:
        swaps = sum(_bytes(op, plan, problem) for op in (*plan.before, *plan.after))
        steps = [sum(_bytes(op, plan, problem) for step in steps for op in step.comm) for steps in plan.steps]
        for rank in range(problem.ranks):
            totals[rank] += swaps + steps[plan.grid.coordinates(rank)["context"]]
    return [round(total) for total in totals]


def _bytes(op: Comm | SwapHeads, plan: Plan, problem: Problem) -> float:
    kv_ratio = plan.kv_ratio(problem.heads, problem.kv_heads)
    rows = problem.length // problem.ranks * problem.batch * problem.heads
    partial = PARTIAL
    if isinstance(op, SwapHeads):  # what comes home is whole, unless key/value heads were replicated
        partial = {T.DKV} if plan.heads > problem.kv_heads else set()
    total = 0.0
    for tensor, amount in traffic(op, kv_ratio).items():
        size = 4 if tensor in partial else DTYPES[problem.dtype].itemsize
        chunks = amount / units(tensor, kv_ratio)
        total += rows * (amount * problem.head_dim * size + chunks * 4 * ROW_STATISTICS.get(tensor, 0))
    return total
