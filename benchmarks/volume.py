"""The exact number of bytes that each rank receives in a plan, for comparison with the counters of sockets."""

from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.volume import Shape, received_bytes

from .cases import DTYPES, Workload


def planned_bytes(plans: tuple[Plan, ...], problem: Workload) -> list[int]:
    """Bytes each rank receives in all `plans` of one attention."""
    rows = problem.length // problem.ranks * problem.batch
    shape = Shape(rows, problem.heads, problem.kv_heads, problem.head_dim, DTYPES[problem.dtype].itemsize)
    received = []
    for rank in range(problem.ranks):
        received.append(sum(received_bytes(plan, rank, shape) for plan in plans))
    return received
