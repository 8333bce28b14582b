"""Communicators start whatever groups each rank already has. If a rank is missing or differs, one line names it."""

import inspect
import os
import random
import re
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.context_parallel import STRATEGIES, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.kernels.reference import attention
from megatron.context_parallel.patches.torch_process_groups import timeout_of
from megatron.context_parallel.plan.ir import RANK_PLACEMENTS, AllGather, Attend, PlanError, ReduceScatter, Step, T
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.strategies import Pass, parse_spec, register
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from tests.support.exact import DIM, gradients

HEADS = 6


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def own_options(name: str, n: int) -> list[dict]:
    """Options of the strategy that change its communicators on n ranks."""
    grids = [(d, n // d) for d in divisors(n)]
    return {
        "attention2d": [{"grid": grid, "overlap": overlap} for grid in grids for overlap in (True, False)],
        "mesh": [{"grid": grid} for grid in grids],
        "loongtrain": [{"inner_ring_size": d} for d in divisors(n)],
        "lightseq": [{"prefetch": prefetch} for prefetch in (True, False)],
    }.get(name, [{}])


def all_cases(n: int) -> list[tuple[str, dict]]:
    cases = []
    for name, strategy in STRATEGIES.items():
        least = {"optional": 1, "required": 2, "all": n}[strategy.head_parallel]
        for size in (d for d in divisors(n) if d >= least):
            for placement in RANK_PLACEMENTS if 1 < size < n else RANK_PLACEMENTS[:1]:
                how = {"head_parallel_size": size, "placement": placement}
                cases += [(name, {**how, **own}) for own in own_options(name, n // size)]
    return cases


def uneven_groups() -> None:
    """Gives each rank another number of groups. From torch 2.15 on it can then make no more by `new_group`."""
    for _ in range(dist.get_rank()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def error_of(cp: ContextParallel) -> float:
    """The largest relative error of this rank's output, log-sum-exp and gradients."""
    torch.manual_seed(cp.n)
    whole = [torch.randn(4 * cp.n, 1, HEADS * 2, DIM) for _ in range(4)]
    wide = gradients(lambda *x: attention(*x, causal=True, scale=DIM**-0.5), *(x.double() for x in whole))
    here = [cp.shard(x) for x in whole]
    got = gradients(lambda *x: context_parallel_attention(*x, cp, return_lse=True), *here)
    pairs = zip(got, (cp.shard(x) for x in wide), strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def refusal(*args, **options) -> str:
    with pytest.raises(UsageError) as refused:
        ContextParallel(*args, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def _every_case(cases: list[tuple[str, dict]]) -> list[float]:
    uneven_groups()
    everyone, found = list(range(dist.get_world_size())), []
    for name, options in cases:
        cp = ContextParallel(name, **options)
        collective = name == "allgather" or options.get("overlap") is False
        found.append(error_of(cp) if collective or name == "lightseq" else 0.0)
        for group in cp._transport._groups.values():  # their threads would pile up
            if dist.get_process_group_ranks(group) != everyone or group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    return found


def test_strategies_come_up_after_uneven_groups(ranks):
    cases = all_cases(6)[::4]
    for found in ranks(6, _every_case, cases):
        wrong = [(case, error) for case, error in zip(cases, found, strict=True) if not error < 2e-6]
        assert not wrong


def _one_after_the_other() -> list[float]:
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=17))
    uneven_groups()
    first = ContextParallel("lightseq", group=group)
    for communicator in first._transport._groups.values():
        assert timeout_of(communicator) == timedelta(seconds=17)
    dist.destroy_process_group(group)
    kept = [
        ContextParallel("allgather", head_parallel_size=2),
        ContextParallel("lightseq"),
        ContextParallel("lightseq"),
    ]
    return [error_of(cp) for cp in (*kept, *kept)]


def test_one_made_after_another_has_communicators_of_its_own(ranks):
    for found in ranks(4, _one_after_the_other):
        assert max(found) < 2e-6


def _side_by_side() -> float:
    how: dict = {"timeout": timedelta(seconds=20)}
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # torch 2.11 always sorts them
        how["sort_ranks"] = False
    pairs = {pair: dist.new_group(pair, **how) for pair in ((0, 1), (0, 2), (3, 2))}
    uneven_groups()
    world, cps = dist.group.WORLD, []
    world.bound_device_id = torch.device("cuda:0")
    with patch("torch.distributed.distributed_c10d._get_split_source") as split:
        for pair in pairs:  # the pair (0, 2) is the second of rank 0 and the first of rank 2
            if dist.get_rank() in pair:
                cps.append(ContextParallel("loongtrain" if 1 in pair else "lightseq", group=pairs[pair]))
    assert not split.called, "NCCL would split the world and wait for all its ranks"
    assert world.bound_device_id == torch.device("cuda:0")
    world.bound_device_id = None
    return max(error_of(cp) for cp in cps)


def test_groups_side_by_side_and_across_in_a_world_bound_to_devices(ranks):
    assert max(ranks(4, _side_by_side)) < 2e-6


def _nccl() -> list:
    with (
        patch("torch.distributed.get_backend_config", return_value="cuda:nccl"),
        patch("torch.cuda.current_device", return_value=3),
        patch("torch.distributed.barrier") as barrier,
    ):
        cp = ContextParallel("lightseq")
    assert [call.args[0] for call in barrier.call_args_list] == list(cp._transport._groups.values())
    return [call.kwargs for call in barrier.call_args_list]


def test_nccl_connects_each_communicator_on_the_current_device(ranks):
    assert ranks(2, _nccl) == [[{"device_ids": [3]}] * 2] * 2


def _devices() -> list[torch.device | None]:
    """The device that a new communicator is made for, with other backends and with that of torch 2.15 for NCCL."""
    found, real = [], distributed_c10d._new_process_group_helper

    def noted(*args, device_id, **how):
        found.append(device_id)
        return real(*args, **how)

    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 3)
    backend = type(world._get_backend(torch.device("cpu")))
    try:
        with patch.object(distributed_c10d, "_new_process_group_helper", noted):
            ContextParallel("attention2d")
            with patch.object(dist, "ProcessGroupNCCL2", backend, create=True):
                ContextParallel("attention2d")
        assert world.bound_device_id == torch.device("cuda", 3)
    finally:
        world.bound_device_id = None
    return found


def test_communicators_have_the_device_of_their_group_where_nccl_needs_it(ranks):
    for found in ranks(2, _devices):
        half = len(found) // 2
        assert half and found == [None] * half + [torch.device("cuda", 3)] * half


def _missing() -> list[str]:
    everyone, absent = list(range(dist.get_world_size())), dist.get_rank() == 1
    group = dist.new_group(everyone, timeout=timedelta(seconds=1))
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if absent:
        store.wait(["0", "2"])
    lines = [refusal("ring", "zigzag", group)]
    store.set(str(dist.get_rank()), "over")
    store.wait(["0", "1", "2"])
    assert error_of(ContextParallel("lightseq", group=group)) < 2e-6
    return lines


def test_a_missing_rank_is_named(ranks):
    (first,), (late,), (other,) = ranks(3, _missing)
    for line in (first, other):
        assert "--cp-strategy ring:layout=zigzag on ranks 0, 1, 2: rank 1 did not join within 1 s" in line
    assert "ranks 0, 2: gave up waiting for rank 1; rank 1: --cp-strategy ring:layout=zigzag" in late


def _different(calls: list[tuple]) -> str:
    name, layout, options = calls[dist.get_rank()]
    return refusal(name, layout, **options)


@pytest.mark.parametrize(
    "two,named",
    [
        (("ulysses", None, {}), "rank 2: --cp-strategy ulysses"),
        (("mesh", "cyclic", {"grid": (1, 3)}), "rank 2: --cp-strategy mesh:grid=1x3,layout=cyclic"),
        (("mesh", None, {"grid": (3, 1)}), "rank 2: --cp-strategy mesh:grid=3x1"),
        (("mesh", None, {"grid": (2, 1)}), "rank 2: --cp-strategy mesh:grid=2x1"),
    ],
)
def test_a_rank_given_something_else_is_named(ranks, two, named):
    one = ("mesh", None, {"grid": (1, 3)})
    lines = ranks(3, _different, [one, one, two])
    assert len(set(lines)) == 1
    assert "ranks 0, 1: --cp-strategy mesh:grid=1x3;" in lines[0]
    assert lines[0].endswith(named)


def _other_code() -> str | None:
    """Each rank computes the queries of all with one chunk of keys, and rank 1 of 2 believes that it is the first."""
    first = dist.get_rank()

    def split(at: Pass):
        everyone = tuple(range(at.n))
        yield Step((AllGather(T.KV, everyone, everyone), AllGather(at.query, everyone, everyone)))
        yield Step((), (Attend(everyone, ((at.rank + first) % at.n,)),))
        yield Step((ReduceScatter(at.result, everyone, everyone),))
        if at.backward:
            yield Step((ReduceScatter(T.DKV, everyone, everyone),))

    strategy = register("split", ("zigzag",), ("gather",))(split)
    try:
        verify(strategy.plan(2))
        return refusal("split")
    finally:
        del STRATEGIES["split"]


def test_ranks_whose_strategies_have_other_code_are_told(ranks):
    """Each of their plans is right, and together they compute something else."""
    for told in ranks(2, _other_code):
        assert re.fullmatch(
            "the ranks of a context group need the same strategy, layout and options: "
            "rank 0: --cp-strategy split with code that writes the plans [0-9a-f]{8}; "
            "rank 1: --cp-strategy split with code that writes the plans [0-9a-f]{8}",
            told,
        )


def _outside() -> str | None:
    group = dist.new_group([0])
    if dist.get_rank():
        return refusal(group=group)
    cp = ContextParallel(group=group)
    with pytest.raises(PlanError, match="'extra' of ranks \\[0\\]: no communicator"):
        cp._transport.exchange("extra", [], [])


def test_a_rank_outside_the_group_is_told(ranks):
    assert "rank 1 is not in the given group" in ranks(2, _outside)[1]


def test_without_process_groups():
    assert not dist.is_initialized()
    assert "torch.distributed.init_process_group()" in refusal()


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_no_mask_needs_other_communicators_than_causal_and_full_ones(n):
    draw = random.Random(n)
    for name, options in all_cases(n):
        strategy, m = STRATEGIES[name], n // options["head_parallel_size"]
        for layout in strategy.layouts:
            how = {"layout": layout, **options}
            plans = [strategy.plan(n, causal=c, backward=b, **how) for c in (True, False) for b in (True, False)]
            made = set()
            for plan in plans:
                made |= {(r, needed) for r in range(n) for needed in plan.communicators(r)}
            for look_back in (True, False):
                rows = [draw.getrandbits(m) & (2 << q) - 1 if look_back else draw.getrandbits(m) for q in range(m)]
                visible_pairs = Pairs(tuple(row | 1 << q for q, row in enumerate(rows)))
                for backward in (False, True):
                    plan = strategy.plan(n, visible_pairs=visible_pairs, backward=backward, **how)
                    assert made.issuperset((r, needed) for r in range(n) for needed in plan.communicators(r))


def test_the_table_of_communicators():
    """docs/memory.md has the most of any of 8 ranks."""
    page = (Path(__file__).parents[2] / "docs/memory.md").read_text()
    rows = {spec: (int(made), int(peers)) for spec, made, peers in re.findall(r"\| `(.+)` \| (\d) \| (\d+) \|", page)}
    assert {spec.split(":")[0] for spec in rows} == {*STRATEGIES}
    for spec, counts in rows.items():
        plans = [parse_spec(spec).plan(8, causal=c, backward=b) for c in (True, False) for b in (True, False)]
        made, peers = [], []
        for rank in range(8):
            made.append(len({x for plan in plans for x in plan.communicators(rank)}))
            messages = {x for plan in plans for x in plan.messages(rank)}
            peers.append(len({(channel, *({a, b} - {rank})) for channel, a, b in messages}))
        assert counts == (max(made), max(peers)), spec


def _threads() -> int:
    count = len(os.listdir("/proc/self/task"))
    for name in ("lightseq", "attention2d"):
        ContextParallel(name)
    assert len(os.listdir("/proc/self/task")) > count
    return count


def test_the_end_of_the_world_ends_their_threads(ranks):
    ranks(4, _threads)  # whatever starts once per process
    assert ranks(4, _threads) == ranks(4, _threads)
