"""Plans changed at random: each is refused by `verify` with a PlanError or computes exact attention.

    python -m tests.campaigns.plan_mutations --count 2000 --seed 0

`mutate(plan, draw)` returns a changed plan whose name says what was changed.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from megatron.context_parallel.plan.ir import AllGather, Plan, Recv, ReduceScatter, Send, Step, T
from tests.support.verdict import judge, subjects

Steps = list[list[tuple[list, list]]]  # of a rank, then of a step: operations and blocks

# -- changes: each edits the steps in place and returns its description, or None if it finds nothing to change ---------


def _spot(steps: Steps, draw: random.Random, of: int, kinds: type = object) -> tuple[int, int, int] | None:
    """(rank, step, place) of a random operation (`of` 0) or block (1) of some kinds."""
    spots = []
    for r, rank in enumerate(steps):
        for s, step in enumerate(rank):
            spots += [(r, s, i) for i, op in enumerate(step[of]) if isinstance(op, kinds)]
    return draw.choice(spots) if spots else None


def swap_steps(steps: Steps, draw: random.Random) -> str | None:
    rank = draw.choice(steps)
    if len(rank) < 2:
        return None
    a = draw.randrange(len(rank) - 1)
    b = draw.choice([a + 1, draw.randrange(len(rank))])
    rank[a], rank[b] = rank[b], rank[a]
    return f"rank {steps.index(rank)}: steps {a} and {b} swapped"


def swap_steps_of_all(steps: Steps, draw: random.Random) -> str | None:
    last = min(map(len, steps)) - 1
    if last < 1:
        return None
    a = draw.randrange(last)
    for rank in steps:
        rank[a], rank[a + 1] = rank[a + 1], rank[a]
    return f"all ranks: steps {a} and {a + 1} swapped"


def swap_ranks(steps: Steps, draw: random.Random) -> str | None:
    if len(steps) < 2:
        return None
    a, b = draw.sample(range(len(steps)), 2)
    steps[a], steps[b] = steps[b], steps[a]
    return f"ranks {a} and {b} swapped"


def split_step(steps: Steps, draw: random.Random) -> str | None:
    r = draw.randrange(len(steps))
    if not steps[r]:
        return None
    s = draw.randrange(len(steps[r]))
    comm, attend = steps[r][s]
    place = draw.randrange(len(comm) + 1)
    steps[r][s : s + 1] = [(comm[:place], []), (comm[place:], attend)]
    return f"rank {r}, step {s}: split before operation {place}"


def merge_steps(steps: Steps, draw: random.Random) -> str | None:
    r = draw.randrange(len(steps))
    if len(steps[r]) < 2:
        return None
    s = draw.randrange(len(steps[r]) - 1)
    first, second = steps[r][s : s + 2]
    steps[r][s : s + 2] = [(first[0] + second[0], first[1] + second[1])]
    return f"rank {r}: steps {s} and {s + 1} merged"


def _drop(of: int) -> Callable:
    def drop(steps: Steps, draw: random.Random) -> str | None:
        if not (spot := _spot(steps, draw, of)):
            return None
        r, s, i = spot
        return f"rank {r}, step {s}: dropped {steps[r][s][of].pop(i)}"

    return drop


def _duplicate(of: int) -> Callable:
    def duplicate(steps: Steps, draw: random.Random) -> str | None:
        if not (spot := _spot(steps, draw, of)):
            return None
        r, s, i = spot
        to = draw.choice([s, draw.randrange(len(steps[r]))])
        steps[r][to][of].append(steps[r][s][of][i])
        return f"rank {r}, step {s}: {steps[r][s][of][i]} again in step {to}"

    return duplicate


def _move(of: int) -> Callable:
    def move(steps: Steps, draw: random.Random) -> str | None:
        if not (spot := _spot(steps, draw, of)):
            return None
        r, s, i = spot
        to = min(max(0, s + draw.choice((-1, 1))), len(steps[r]) - 1)
        op = steps[r][s][of].pop(i)
        steps[r][to][of].insert(draw.randrange(len(steps[r][to][of]) + 1), op)
        return f"rank {r}: {op} from step {s} to {to}"

    return move


def move_messages(steps: Steps, draw: random.Random) -> str | None:
    """Both ends of one message, or of all of a tensor from a rank, by some steps each, perhaps to another channel."""
    if not (spot := _spot(steps, draw, 0, Send)):
        return None
    r, s, i = spot
    like, every = steps[r][s][0][i], draw.random() < 0.5
    channel = draw.choice([like.channel, draw.choice(_channels(steps))])
    sent, received = draw.randrange(-2, 3), draw.randrange(-2, 3)

    def moves(rank: int, op: object) -> bool:
        if rank == r and isinstance(op, Send):
            return op == like or (every and op.tensor == like.tensor)
        if isinstance(op, Recv) and op.peer == r and op.tensor == like.tensor:
            return every or (rank == like.peer and op.chunk == like.chunk)
        return False

    for rank, its in enumerate(steps):
        moved = [(at, op) for at, (comm, _) in enumerate(its) for op in comm if moves(rank, op)]
        for comm, _ in its:
            comm[:] = [op for op in comm if not moves(rank, op)]
        for at, op in moved:
            to = min(max(0, at + (sent if isinstance(op, Send) else received)), len(its) - 1)
            its[to][0].append(replace(op, channel=channel))
    whole = f"all {like.tensor} of it" if every else like
    return f"rank {r}: {whole} sent {sent} and received {received} steps later on channel {channel}"


def move_block_to_another_rank(steps: Steps, draw: random.Random) -> str | None:
    if not (spot := _spot(steps, draw, 1)):
        return None
    r, s, i = spot
    other = draw.randrange(len(steps))
    if not steps[other]:
        return None
    to = draw.randrange(len(steps[other]))
    steps[other][to][1].append(steps[r][s][1].pop(i))
    return f"block of rank {r}, step {s} to rank {other}, step {to}"


def reorder(steps: Steps, draw: random.Random) -> str | None:
    if not (spot := _spot(steps, draw, 0)):
        return None
    r, s, _ = spot
    draw.shuffle(steps[r][s][0])
    return f"rank {r}, step {s}: operations in another order"


def change_message(steps: Steps, draw: random.Random) -> str | None:
    """Another chunk, peer, channel or tensor."""
    if not (spot := _spot(steps, draw, 0, Send | Recv)):
        return None
    r, s, i = spot
    op, n = steps[r][s][0][i], len(steps)
    what, value = draw.choice(
        [
            ("chunk", draw.randrange(-1, n + 1)),
            ("peer", draw.randrange(-1, n + 1)),
            ("channel", draw.choice(_channels(steps))),
            ("tensor", draw.choice(list(T))),
        ]
    )
    steps[r][s][0][i] = replace(op, **{what: value})
    return f"rank {r}, step {s}: {what} {value} in {op}"


def change_collective(steps: Steps, draw: random.Random) -> str | None:
    """Changes, removes or reorders members or chunks of a collective, on one rank or on all."""
    if not (spot := _spot(steps, draw, 0, AllGather | ReduceScatter)):
        return None
    r, s, i = spot
    op = steps[r][s][0][i]
    what = draw.choice(("group", "chunks"))
    values = list(getattr(op, what))
    if draw.random() < 0.5 or not values:
        draw.shuffle(values)
    else:
        values.pop(draw.randrange(len(values)))
    new = replace(op, **{what: tuple(values)})
    for rank in steps if draw.random() < 0.5 else steps[r : r + 1]:
        for comm, _ in rank:
            comm[:] = [new if o == op else o for o in comm]
    return f"rank {r}, step {s}: {what} {values} in {op}"


def change_channel_of_all(steps: Steps, draw: random.Random) -> str | None:
    """Moves all operations on a tensor or a channel to another channel; the plan may still be right."""
    if not (spot := _spot(steps, draw, 0)):
        return None
    r, s, i = spot
    op, to, by = steps[r][s][0][i], draw.choice(_channels(steps)), draw.choice(("tensor", "channel"))
    for rank in steps:
        for comm, _ in rank:
            comm[:] = [replace(o, channel=to) if getattr(o, by) == getattr(op, by) else o for o in comm]
    return f"{by} {getattr(op, by)} on channel {to}"


def change_block(steps: Steps, draw: random.Random) -> str | None:
    """Adds, removes or replaces a chunk."""
    if not (spot := _spot(steps, draw, 1)):
        return None
    r, s, i = spot
    block, what = steps[r][s][1][i], draw.choice(("q_chunks", "kv_chunks"))
    chunks = list(getattr(block, what))
    match draw.randrange(3) if chunks else 0:
        case 0:
            chunks.append(draw.randrange(len(steps) + 1))
        case 1:
            chunks.pop()
        case 2:
            chunks[-1] = draw.randrange(len(steps))
    steps[r][s][1][i] = replace(block, **{what: tuple(chunks)})
    return f"rank {r}, step {s}: {what} {chunks} in {block}"


def split_block(steps: Steps, draw: random.Random) -> str | None:
    if not (spot := _spot(steps, draw, 1)):
        return None
    r, s, i = spot
    block = steps[r][s][1].pop(i)
    steps[r][s][1][i:i] = [replace(block, kv_chunks=(kv,)) for kv in block.kv_chunks]
    return f"rank {r}, step {s}: {block} by key/value chunks"


def split_heads(steps: Steps, draw: random.Random) -> str | None:
    """A part of the heads now, and the others perhaps in a later step."""
    if not (spot := _spot(steps, draw, 1)):
        return None
    r, s, i = spot
    block, to = steps[r][s][1][i], draw.choice([s, draw.randrange(s, len(steps[r]))])
    first, end = block.heads
    cut = first + (end - first) * draw.choice((0.25, 0.5, 0.7))
    steps[r][s][1][i] = replace(block, heads=(first, cut))
    steps[r][to][1].insert(i + 1 if to == s else 0, replace(block, heads=(cut, end)))
    return f"rank {r}, step {s}: {block} to {cut} of its heads, the others in step {to}"


def _channels(steps: Steps) -> list[str]:
    found = set()
    for rank in steps:
        found |= {op.channel for comm, _ in rank for op in comm}
    return [*sorted(found), "another"]


CHANGES = {
    "swap steps": swap_steps,
    "swap steps of all ranks": swap_steps_of_all,
    "swap ranks": swap_ranks,
    "split a step": split_step,
    "merge steps": merge_steps,
    "drop an operation": _drop(0),
    "drop a block": _drop(1),
    "duplicate an operation": _duplicate(0),
    "duplicate a block": _duplicate(1),
    "move an operation": _move(0),
    "move a block": _move(1),
    "move messages": move_messages,
    "move a block to another rank": move_block_to_another_rank,
    "reorder operations": reorder,
    "change a message": change_message,
    "change a collective": change_collective,
    "change a channel everywhere": change_channel_of_all,
    "change a block": change_block,
    "split a block": split_block,
    "split the heads of a block": split_heads,
}


def mutate(plan: Plan, draw: random.Random) -> Plan:
    """`plan` with one to three changes, which its name lists. It declares every channel that a change may use."""
    steps: Steps = []
    for rank in plan.steps:
        steps.append([(list(step.comm), list(step.attend)) for step in rank])
    done: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        done += filter(None, [draw.choice(list(CHANGES.values()))(steps, draw)])
    new = []
    for edited in steps:
        new.append(tuple(Step(tuple(comm), tuple(attend)) for comm, attend in edited))
    return replace(plan, name="; ".join((plan.name, *done)), steps=tuple(new), channels=(*plan.channels, "another"))


def run(count: int, seed: int) -> Counter:
    """How many of `count` changed plans are refused, and how many are right."""
    draw, cases, verdicts = random.Random(seed), subjects(), Counter()
    for _ in range(count):
        subject = draw.choice(cases)
        plan = mutate(subject.plan(draw.random() < 0.5), draw)
        try:
            verdicts[judge(plan, subject)] += 1
        except Exception as error:
            raise AssertionError(f"{subject.name} on {subject.n} ranks, changed: {plan.name}") from error
    return verdicts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="changed plans to try; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the changes; default: %(default)s")
    args = parser.parse_args()
    print(dict(run(args.count, args.seed)))
