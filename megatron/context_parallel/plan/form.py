"""Checks the form of a plan. Readers of a plan rely on it."""

from collections import Counter

from .ir import PARTIAL, AllGather, Attend, Collective, Comm, Plan, PlanError, ReduceScatter, Step, T


def check_form(plan: Plan) -> None:
    """Checks that each step has valid operations and blocks.

    Ranks and chunks exist, channels are declared, tensors belong to the pass, and no partial is sent twice in a step.

    Raises:
        PlanError: the message names rank and step of the first error.
    """
    if plan.n != plan.visible_pairs.n or plan.n < 1:
        raise PlanError(
            f"{plan.name}: steps of {plan.n} ranks for a mask of {plan.visible_pairs.n} chunks; need one rank per chunk"
        )
    for q, row in enumerate(plan.visible_pairs.rows):
        if not 0 <= row < 1 << plan.n:
            raise PlanError(f"{plan.name}: query chunk {q} sees chunks {row:#b}; need bits of {plan.n} chunks")
    travels = frozenset((*plan.inputs, *plan.results))
    for r, steps in enumerate(plan.steps):
        if not isinstance(steps, tuple):
            raise PlanError(f"rank {r}: steps {steps!r} are not a tuple")
        for s, step in enumerate(steps):
            if wrong := _wrong(step, r, plan.n, travels) or _undeclared(step, plan.channels):
                raise PlanError(f"rank {r}, step {s}: {wrong}")


def _wrong(step: object, r: int, n: int, travels: frozenset[T]) -> str:
    """The errors of a step; none if it is well formed."""
    if not isinstance(step, Step) or not isinstance(step.comm, tuple) or not isinstance(step.attend, tuple):
        return f"{step!r} is not a Step with a tuple of operations and a tuple of blocks"
    for attend in step.attend:
        if wrong := wrong_block(attend, n):
            return wrong
    for op in step.comm:
        if wrong := _wrong_comm(op, r, n, travels):
            return wrong
    if any(op.tensor in PARTIAL for op in step.comm):
        leaving = Counter(key for op in step.comm for key in op.reads(r) if op.tensor in PARTIAL)
        return next(
            (f"{t} chunk {c} is sent {k} times, but moves with the first" for (t, c), k in leaving.items() if k > 1),
            "",
        )
    return ""


def _undeclared(step: Step, channels: tuple[str, ...]) -> str:
    """The first message or reduce-scatter on a channel that the plan does not declare."""
    for op in step.comm:
        if not isinstance(op, AllGather) and op.channel not in channels:
            which = f"chunks {op.chunks}" if isinstance(op, ReduceScatter) else f"chunk {op.chunk}"
            what = f"{type(op).__name__} of {op.tensor} {which} on channel {op.channel!r}"
            return f"{what}, which is not one of {channels!r}; declare it"
    return ""


def wrong_block(attend: object, n: int) -> str:
    """What is wrong with the form of a block among n chunks; nothing if it is well formed."""
    if not isinstance(attend, Attend):
        return f"{attend!r} is not a block"
    for what, chunks in (("query", attend.q_chunks), ("key/value", attend.kv_chunks)):
        if not _distinct(chunks, n) or not chunks:
            return f"{what} chunks {chunks!r} of a block; need a tuple of distinct chunks, each below {n}"
    if not _ascending(attend.heads):
        return f"heads {attend.heads!r} of a block; need two ascending shares, such as (0.0, 0.5)"
    return ""


def _wrong_comm(op: object, r: int, n: int, travels: frozenset[T]) -> str:
    if not isinstance(op, Comm):
        return f"{op!r} is not an operation"
    kind = type(op).__name__
    if not isinstance(op.tensor, T) or op.tensor not in travels:
        given = f"T.{op.tensor}" if isinstance(op.tensor, T) else repr(op.tensor)
        return f"{kind} of {given}, which is not sent in this pass; need T.{', T.'.join(sorted(travels))}"
    if not isinstance(op.channel, str) or not op.channel:
        return f"{kind} of {op.tensor} on channel {op.channel!r}; need a name"
    if isinstance(op, Collective):
        return _wrong_collective(op, kind, r, n)
    if not _below(op.chunk, n):
        return f"{kind} of {op.tensor} chunk {op.chunk!r}; need a chunk below {n}"
    if not _below(op.peer, n) or op.peer == r:
        return f"{kind} of {op.tensor} chunk {op.chunk} has peer {op.peer!r}; need another rank below {n}"
    return ""


def _wrong_collective(op: Collective, kind: str, r: int, n: int) -> str:
    what = f"{kind} of {op.tensor} over ranks {op.group!r}"
    if (op.tensor in PARTIAL) != isinstance(op, ReduceScatter):
        return f"{what}: partials are reduce-scattered, other tensors gathered"
    if not _distinct(op.group, n) or len(op.group) < 2 or list(op.group) != sorted(op.group):
        return f"{what}: need a tuple of two or more ranks below {n} in ascending order"
    if r not in op.group:
        return f"{what}: rank {r} is not one of them"
    if not _distinct(op.chunks, n) or len(op.chunks) != len(op.group):
        return f"{what}: chunks {op.chunks!r}; need a tuple of as many distinct chunks, each below {n}"
    return ""


def _ascending(heads: object) -> bool:
    if not isinstance(heads, tuple) or [type(share) in (int, float) for share in heads] != [True, True]:
        return False
    return 0 <= heads[0] < heads[1] <= 1


def _below(x: object, n: int) -> bool:
    return type(x) is int and 0 <= x < n


def _distinct(xs: object, n: int) -> bool:
    return isinstance(xs, tuple) and all(_below(x, n) for x in xs) and len(set(xs)) == len(xs)
