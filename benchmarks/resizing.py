"""The attention of packed documents if context groups change their size, as Megatron's hybrid context parallelism does.

The rule is that of `BalancedCPScheduler` in megatron-core (Megatron-LM d98e8a6): a document of L tokens gets the least
power of two of ranks that leaves each at most `most` tokens. Documents are taken longest first, from buckets of equal
work, in rounds that end with a barrier. A document goes to free ranks or to the least loaded group of its size. A round
ends if nothing fits, or if all ranks have about the same work. If a rank is left without work, a group is doubled.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil, log2

from megatron.context_parallel.tokens.place_documents import Costs

SLACK = 0.05  # of the largest work of a rank: how much less another one may have in a balanced round
OVERFULL = 1.1  # of its part of the work: how full a bucket may be


@dataclass
class Group:
    """Ranks that compute the same documents one after the other."""

    size: int
    documents: list[int] = field(default_factory=list)

    @property
    def work(self) -> float:
        return sum(length**2 / self.size for length in self.documents)


def seconds_of_resizing(lengths: list[int], ranks: int, most: int, costs: Costs) -> float:
    """Both passes of all rounds, if every message of the rings is hidden as far as the links allow.

    Raises:
        ValueError: a document needs more ranks than there are.
    """
    left = sorted(lengths, reverse=True)
    total = 0.0
    while left:
        groups, left = round_of(left, ranks, most)
        total += max(sum(_seconds(length, group.size, costs) for length in group.documents) for group in groups)
    return total


def _seconds(length: int, size: int, costs: Costs) -> float:
    """A causal document over a ring of `size` ranks: keys of all others arrive, and gradients return."""
    row = costs.row_inside if size <= (costs.ranks_per_node or size) else costs.row_between
    return max(costs.pair * length * (length + 1) / 2 / size, 2 * row * length * (size - 1) / size)


def round_of(lengths: list[int], ranks: int, most: int) -> tuple[list[Group], list[int]]:
    """The groups of one round, and the documents of later rounds. `lengths` descend, and so do those."""
    buckets = _buckets(lengths, most)
    groups: list[Group] = []
    first_size = _size(lengths[0], most)
    if first_size > ranks:
        raise ValueError(f"{lengths[0]} tokens need {first_size} ranks of {most} tokens, and there are {ranks}")
    while bucket := next((one for one in buckets if one and _fits(_size(one[0], most), groups, ranks)), None):
        size = _size(bucket[0], most)
        alike = [group for group in groups if group.size == size]
        if not alike or _free(groups, ranks) >= size:
            groups.append(Group(size))
            alike = groups[-1:]
        min(alike, key=lambda group: group.work).documents.append(bucket.popleft())
        if size < first_size and any(buckets) and _slack(groups, ranks) <= SLACK:
            break
    left = [length for bucket in buckets for length in bucket]
    left += _trimmed(groups, ranks)
    _fill(groups, ranks)
    return groups, sorted(left, reverse=True)


def _size(length: int, most: int) -> int:
    return 2 ** max(0, ceil(log2(length / most)))


def _buckets(lengths: list[int], most: int) -> list[deque[int]]:
    """As many buckets as there are sizes of groups, of about the same work for each rank."""
    works = [length**2 / _size(length, most) for length in lengths]
    count = len({_size(length, most) for length in lengths})
    target = sum(works) / count
    buckets = [deque[int]()]
    filled = 0.0
    for number, (length, work) in enumerate(zip(lengths, works, strict=True)):
        others = count - len(buckets) + 1
        if buckets[-1] and (filled + work > OVERFULL * target or len(lengths) - number <= others - 1):
            buckets.append(deque())
            filled = 0.0
        buckets[-1].append(length)
        filled += work
    return buckets


def _free(groups: list[Group], ranks: int) -> int:
    return ranks - sum(group.size for group in groups)


def _fits(size: int, groups: list[Group], ranks: int) -> bool:
    return _free(groups, ranks) >= size or any(group.size == size for group in groups)


def _slack(groups: list[Group], ranks: int) -> float:
    """How much less work than the busiest rank the idlest one has, as a share."""
    works = [group.work for group in groups]
    return 1.0 if _free(groups, ranks) else 1 - min(works) / max(works)


def _trimmed(groups: list[Group], ranks: int) -> list[int]:
    """Takes the last documents of the busiest groups away, while that makes the ranks more even; returns them."""
    taken: list[int] = []
    while not _free(groups, ranks) and _slack(groups, ranks) > SLACK:
        busiest = max(groups, key=lambda group: group.work)
        before = busiest.work - min(group.work for group in groups)
        if len(busiest.documents) < 2:
            break
        taken.append(busiest.documents.pop())
        works = [group.work for group in groups]
        if max(works) - min(works) >= before:
            busiest.documents.append(taken.pop())
            break
    return taken


def _fill(groups: list[Group], ranks: int) -> None:
    """Doubles the first of the smallest groups while ranks are free."""
    while free := _free(groups, ranks):
        smallest = min(groups, key=lambda group: group.size)
        smallest.size += min(smallest.size, free)
