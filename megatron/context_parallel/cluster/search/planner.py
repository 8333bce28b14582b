"""Finds the fastest strategy on a described cluster."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from megatron.context_parallel.cluster.description import Cluster, for_tensors
from megatron.context_parallel.cluster.simulate.block_time import MANY_RANKS, BlockTime
from megatron.context_parallel.cluster.simulate.links import Links
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.cluster.step.attention_pass import pass_buffers, simulated_rows
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.ir import Plan, T
from megatron.context_parallel.plan.volume import chunk_bytes
from megatron.context_parallel.progress import Progress, tracked
from megatron.context_parallel.strategies import AUTO, parse_spec

from .candidates import Candidate, Rejected, Workload, candidates, in_rounds, in_token_rounds
from .lower_bound import PassBound, lower_bound
from .plainness import plainest

SIMULATED = 64  # choices, those with the best estimates
GAIN = 0.01  # fraction of the time that another strategy for the backward pass, or more rounds, must save
PROMISING = 16  # choices of many ranks whose layouts and weights are tried
TRIED_IN_ROUNDS = 3  # of the fastest choices that split heads

Name = TypeVar("Name", bound=Hashable)


class GroupDevices(NamedTuple):
    """The devices of a context group.

    Attributes:
        cluster: they belong to.
        devices: the device of each rank; default: all of the cluster, in order.
        others: the devices of other groups that compute the same at the same time.
    """

    cluster: Cluster
    devices: Sequence[int] | None = None
    others: Sequence[Sequence[int]] = ()

    @property
    def n(self) -> int:
        return len(self.devices or range(self.cluster.ranks))


class PassPrediction(NamedTuple):
    """The cost of a pass.

    Attributes:
        seconds: until the last rank has its results.
        exposed: seconds of them in which the busiest rank does not compute.
        memory: bytes that a rank has at once beyond its queries, keys and values.
    """

    seconds: float
    exposed: float
    memory: float


class Prediction(NamedTuple):
    """What the passes of a choice take, which run in turn."""

    passes: tuple[PassPrediction, ...]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.passes)

    @property
    def exposed(self) -> float:
        return sum(one.exposed for one in self.passes)

    @property
    def memory(self) -> float:
        return max(one.memory for one in self.passes)


def fastest(
    choices: Mapping[Name, Sequence[Plan]],
    group: GroupDevices,
    workload: Workload,
    max_simulated: int = SIMULATED,
    fit_memory: Callable[[Name], tuple[Name, Sequence[Plan]] | None] | None = None,
) -> tuple[dict[Name, Prediction], dict[Name, float]]:
    """Finds the fastest of several choices. Each has one or more plans, which run in turn.

    The choice of each strategy with the best estimate is simulated first, then the others in the order of their
    estimates, `max_simulated` in total. A choice whose lower bound exceeds the best time is not simulated.

    Args:
        choices: the plans of each, by any name.
        group: where plans run.
        workload: what is computed.
        max_simulated: choices that are simulated.
        fit_memory: the choice that is simulated for a choice, if memory is enough. It is asked only for those that may
            be the fastest. Default: the choice itself.

    Returns:
        The times of simulated choices, fastest first; and the lower bounds of those that are slower.
    """
    bounds = _bounds(choices, group, workload)
    by_estimate = sorted(choices, key=lambda name: bounds[name].estimate)
    leaders = dict[str, Name]()  # of each strategy
    for name in by_estimate:
        leaders.setdefault(choices[name][0].name, name)
    found = dict[Name, Prediction]()
    best = math.inf
    progress = Progress("simulating strategies", min(max_simulated, len(choices)))
    asked = set[Name]()
    for name in dict.fromkeys([*leaders.values(), *by_estimate]):
        if len(found) == max_simulated or bounds[name].lower_bound >= best:
            continue
        asked.add(name)
        if kept := fit_memory(name) if fit_memory else (name, choices[name]):
            spec, plans = kept
            found[spec] = _predict(plans, group, workload)
            best = min(best, found[spec].seconds)
            progress.advance()
    ranked = sorted(found, key=lambda name: found[name].seconds)
    slower = {name: bounds[name].lower_bound for name in by_estimate if name not in asked}
    return {name: found[name] for name in ranked}, slower


def _predict(plans: Sequence[Plan], group: GroupDevices, workload: Workload) -> Prediction:
    passes = []
    shape = workload.shape(group.n)
    how = workload.mask, workload.batch, workload.dtype, group.devices, group.others
    for plan in plans:
        rows = simulated_rows(plan, workload.mask, workload.length)
        found = simulate(plan, group.cluster, shape, *how, rows=rows)
        passes.append(PassPrediction(found.seconds, found.exposed, memory(plan, workload)))
    return Prediction(tuple(passes))


def _bounds(choices: Mapping[Name, Sequence[Plan]], group: GroupDevices, workload: Workload) -> dict[Name, PassBound]:
    links = Links(group.cluster, devices=group.devices, others=group.others)
    shape = workload.shape(group.n)
    blocks = dict[tuple, BlockTime]()

    def bound_of(plan: Plan) -> PassBound:
        alike = plan.backward, plan.layout, plan.n
        if alike not in blocks:
            blocks[alike] = _block_time(plan, group, workload)
        rows = simulated_rows(plan, workload.mask, workload.length)
        return lower_bound(plan, links, shape, blocks[alike], rows)

    bounds = dict[Name, PassBound]()
    for name, plans in tracked(choices.items(), "estimating strategies"):
        passes = list(map(bound_of, plans))
        bounds[name] = PassBound(sum(bound.lower_bound for bound in passes), sum(bound.estimate for bound in passes))
    return bounds


def _block_time(plan: Plan, group: GroupDevices, workload: Workload) -> BlockTime:
    shape = workload.shape(group.n)
    return BlockTime(group.cluster.device, plan, shape, workload.mask, workload.length, workload.dtype)


@dataclass(frozen=True)
class SearchResult:
    """The result of `search`, by spec.

    Attributes:
        ranked: the choices that were simulated, fastest first.
        slower: those that were not, with the lower bounds of their times.
        rejected: those that cannot run.
    """

    ranked: dict[str, Prediction]
    slower: dict[str, float] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def best(self) -> str:
        """The fastest, or a plainer one that is about as fast. Raises UsageError if nothing can run."""
        if not self.ranked:
            why = self.rejected[0].reason if self.rejected else "no strategy has the given options"
            raise UsageError(f"--cp-strategy {AUTO}: no strategy works for this run ({why})")
        return plainest({spec: prediction.seconds for spec, prediction in self.ranked.items()})


def search(
    workload: Workload,
    group: GroupDevices,
    fixed: Mapping[str, Any] | None = None,
    room: float | None = None,
    max_simulated: int = SIMULATED,
) -> SearchResult:
    """Ranks all strategies, with all values of their options worth trying, for a context group.

    Args:
        workload: what is computed.
        group: the devices of the group.
        fixed: options of all strategies that are given.
        room: bytes of a device for what attention takes beyond its inputs; default: all that tensors may take.
        max_simulated: choices that are simulated.
    """
    choices, rejected = dict[str, Candidate](), list[Rejected]()
    fixed = fixed or {}
    room = for_tensors(group.cluster.device.memory_GiB) if room is None else room
    q_transfer_blocks = cache(partial(_q_transfer_blocks, workload, group))
    for found in candidates(workload, group.n, q_transfer_blocks, fixed):
        if isinstance(found, Rejected):
            rejected.append(found)
        else:
            choices[found.choice.spec] = found

    def fit_memory(spec: str) -> tuple[str, tuple[Plan, ...]] | None:
        """The choice, or with more rounds of heads if it then fits."""
        found = choices[spec]
        more = [] if "head_rounds" in fixed else in_rounds(found, workload)
        for one in (found, *more):
            if _needed(one, workload) <= room:
                choices[one.choice.spec] = one
                return one.choice.spec, one.plans
        needed = _needed(found, workload)
        why = f"attention needs {needed / 2**30:.3g} GiB of memory, but only {room / 2**30:.3g} GiB are left"
        rejected.append(Rejected(spec, why))
        return None

    tried, untried = _promising(choices, group, workload) if group.n > MANY_RANKS else ([*choices], {})
    ranked, slower = fastest({spec: choices[spec].plans for spec in tried}, group, workload, max_simulated, fit_memory)
    simulated = {spec: choices[spec] for spec in ranked}
    ranked |= _mixed({spec: found.plans for spec, found in simulated.items()}, ranked)
    if "head_rounds" not in fixed:
        ranked |= _faster_in_rounds(simulated, ranked, group, workload, room, fixed)
    return SearchResult(dict(sorted(ranked.items(), key=lambda item: item[1].seconds)), slower | untried, rejected)


def _promising(
    choices: Mapping[str, Candidate], group: GroupDevices, workload: Workload
) -> tuple[list[str], dict[str, float]]:
    """The choices of many ranks that are tried, and the lower bounds of others.

    Of choices that differ only in the layout and in weights, which change when a block is computed, the first is
    looked at. All of them are tried if it is among the most promising, or the most promising of its strategy.
    """
    alike = defaultdict[tuple, list[str]](list)
    for spec, (choice, _) in choices.items():
        sizes = {name: value for name, value in choice.common.items() if name != "layout"}
        options = {name: value for name, value in choice.options.items() if not isinstance(value, float)}
        alike[choice.strategy.name, *sorted((sizes | options).items())].append(spec)
    bounds = _bounds({family: choices[specs[0]].plans for family, specs in alike.items()}, group, workload)
    by_estimate = sorted(alike, key=lambda family: bounds[family].estimate)
    leaders = {family[0]: family for family in reversed(by_estimate)}
    kept = dict.fromkeys([*by_estimate[:PROMISING], *leaders.values()])
    untried = {alike[family][0]: bounds[family].lower_bound for family in by_estimate if family not in kept}
    return [spec for family in kept for spec in alike[family]], untried


def _needed(found: Candidate, workload: Workload) -> int:
    return max(memory(plan, workload) for plan in found.plans)


def _faster_in_rounds(
    choices: Mapping[str, Candidate],
    ranked: Mapping[str, Prediction],
    group: GroupDevices,
    workload: Workload,
    room: float,
    fixed: Mapping[str, Any],
) -> dict[str, Prediction]:
    """More rounds, of heads or tokens, for the fastest choices that split heads, where they gain enough.

    `choices` has the fastest first.
    """
    found = dict[str, Prediction]()
    split = [spec for spec, one in choices.items() if one.plans[0].keeps_swapped]
    for spec in split[:TRIED_IN_ROUNDS]:
        both = in_rounds(choices[spec], workload), in_token_rounds(choices[spec], workload, fixed)
        for more in chain(*both):
            if _needed(more, workload) <= room:
                predicted = _predict(more.plans, group, workload)
                if predicted.seconds < (1 - GAIN) * ranked[spec].seconds:
                    found[more.choice.spec] = predicted
    return found


def _mixed(choices: Mapping[str, tuple[Plan, ...]], ranked: Mapping[str, Prediction]) -> dict[str, Prediction]:
    """Of choices that place tokens and heads alike, the fastest forward and backward pass, where that gains enough."""
    alike = defaultdict[tuple, list[str]](list)
    found = dict[str, Prediction]()
    for spec, (plan, _) in choices.items():
        alike[plan.layout, plan.head_parallel_size, plan.placement, plan.head_rounds].append(spec)
    for specs in alike.values():
        first = min(specs, key=lambda spec: ranked[spec].passes[0].seconds)
        second = min(specs, key=lambda spec: ranked[spec].passes[1].seconds)
        mixed = Prediction((ranked[first].passes[0], ranked[second].passes[1]))
        if mixed.seconds < (1 - GAIN) * min(ranked[spec].seconds for spec in specs):
            found[f"{first}+{second}"] = mixed
    return found


def memory(plan: Plan, workload: Workload) -> int:
    """Bytes that a pass takes beyond its queries, keys and values, on the first or the last rank of the steps."""
    return round(pass_buffers(plan, workload.shape(plan.all_ranks), {0, plan.n - 1}))


def _q_transfer_blocks(workload: Workload, group: GroupDevices, head_parallel_size: int) -> float:
    """How long a message of queries takes on the slowest link between neighbours, in forward blocks."""
    n = group.n
    if head_parallel_size == n:
        return 1.0
    plan = parse_spec("ring", layout="cyclic", head_parallel_size=head_parallel_size).plan(n)
    waiting = max(1.0, n / (group.cluster.shared_cores or n))  # for a processor
    block = _block_time(plan, group, workload).seconds((1,), (0,)) * waiting
    size = chunk_bytes(plan, T.Q, workload.shape(n), swap=False)
    links = Links(group.cluster, devices=group.devices, others=group.others)
    seconds = defaultdict[tuple, float](float)
    for rank in range(n):
        for link in links.path(rank, (rank + head_parallel_size) % n).links:
            seconds[link.name] += size / link.rate
    return max(seconds.values()) / block if block else math.inf  # a narrow window leaves no pairs
