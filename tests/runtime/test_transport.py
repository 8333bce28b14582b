"""Sending chunks between ranks in one process and through torch.distributed, and the errors if that fails."""

from collections import defaultdict
from functools import partial
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.plan.ir import PlanError
from megatron.context_parallel.runtime.comm.torch_works import WorkBatch, post
from megatron.context_parallel.runtime.comm.transport import (
    LocalTransport,
    MessageQueue,
    Subgroup,
    TorchTransport,
    run_all_ranks,
    run_rank,
)


def numbered(i: int) -> torch.Tensor:
    return torch.full((2, 3), float(i))


# -- in one process -------------------------------------------------------------------------------------------


def test_messages_of_a_line_match_in_order_and_arrive_when_both_ends_are_named():
    post: dict = defaultdict(MessageQueue)
    ranks = [LocalTransport(r, post) for r in range(3)]
    into = [torch.zeros(2, 3) for _ in range(3)]
    receives = ranks[1].exchange("ring", [], [(0, into[0]), (0, into[1])])
    assert not receives.ready() and receives.missing() == "to receive from rank 0 on channel ring"
    first = ranks[0].exchange("ring", [(1, numbered(1))], [])
    assert first.ready() and not receives.ready()
    other = ranks[2].exchange("ring", [(1, numbered(7))], [(1, into[2])])
    assert not other.ready() and other.missing() == "to send to rank 1 on channel ring"
    ranks[0].exchange("second", [(1, numbered(8))], [])
    second = ranks[0].exchange("ring", [(1, numbered(2))], [])
    assert receives.ready() and receives.missing() == "" and second.ready()
    second.wait()
    assert into[1].eq(2).all() and not into[0].any(), "the end that waits first copies its own message alone"
    receives.wait()
    receives.wait()  # nothing is left to do
    first.wait()
    assert into[0].eq(1).all() and into[1].eq(2).all() and not into[2].any()
    assert receives.ready() and receives.missing() == ""


def test_a_message_of_another_shape_is_refused():
    post: dict = defaultdict(MessageQueue)
    LocalTransport(0, post).exchange("ring", [(1, torch.zeros(2, 1))], [])
    arriving = LocalTransport(1, post).exchange("ring", [], [(0, torch.zeros(2, 3))])
    with pytest.raises(PlanError, match=r"a tensor of \[2, 1\] was sent for one of \[2, 3\]"):
        arriving.wait()


def test_a_sent_tensor_may_be_one_of_inference():
    post: dict = defaultdict(MessageQueue)
    with torch.inference_mode():
        x, into = numbered(3), torch.zeros(2, 3)
        sent = LocalTransport(0, post).exchange("ring", [(1, x)], [])
        LocalTransport(1, post).exchange("ring", [], [(0, into)]).wait()
        sent.wait()
    assert into.eq(3).all()


def swapped(transport, me: int, group: tuple[int, ...]):
    """A program: gathers from the group, then trades with each other rank of it, and returns what it got."""
    everyone = torch.zeros(len(group), 2, 3)
    yield transport.all_gather("gather", group, (2,) * len(group), [(numbered(me), everyone.flatten(0, 1))])
    others = [peer for peer in group if peer != me]
    sent = torch.tensor([[10 * me + peer] * 3 for peer in others], dtype=torch.uint8)
    received = torch.zeros_like(sent)
    yield transport.all_to_all("heads", group, sent, received)
    return everyone[:, 0, 0].tolist(), {peer: row[2].item() for peer, row in zip(others, received, strict=True)}


def test_gathering_and_trading():
    plan, post = STRATEGIES["ring"].plan(3), defaultdict(MessageQueue)
    got = run_all_ranks([swapped(LocalTransport(r, post), r, (0, 1, 2)) for r in range(3)], plan)
    for r, (gathered, traded) in enumerate(got):
        assert gathered == [0, 1, 2]
        assert traded == {peer: 10 * peer + r for peer in range(3) if peer != r}


def test_a_subgroup_numbers_its_ranks():
    plan, post = STRATEGIES["ring"].plan(2), defaultdict(MessageQueue)
    inside = [Subgroup(LocalTransport(r, post), (1, 4)) for r in (1, 4)]
    got = run_all_ranks([swapped(transport, i, (0, 1)) for i, transport in enumerate(inside)], plan)
    assert got == [([0, 1], {1: 10}), ([0, 1], {0: 1})]
    assert {line[1:] for line in post} == {(1, 4), (4, 1)}


def test_programs_run_to_their_end_or_say_what_they_wait_for():
    class Done:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    done = Done()

    def program():
        yield done
        yield done
        return 5

    assert run_rank(program()) == 5 and done.waited == 2
    plan, post = STRATEGIES["ring"].plan(3), defaultdict(MessageQueue)

    def waits(rank: int, peer: int):
        yield LocalTransport(rank, post).exchange("ring", [], [(peer, torch.zeros(1))])

    def ends():
        return 1
        yield

    with pytest.raises(PlanError) as refused:
        run_all_ranks([waits(0, 1), ends(), waits(2, 0)], plan)
    assert str(refused.value) == (
        "ring: ranks wait for each other forever: rank 0 to receive from rank 1 on channel ring; "
        "rank 2 to receive from rank 0 on channel ring"
    )


def test_a_trade_over_gloo_posts_all_receives_and_sends_to_one_rank_after_the_other():
    """Rank 5 is the third of its group. It sends to the ranks after it first."""
    log = []

    class Work:
        def __init__(self, kind: str, tensors: list[torch.Tensor], peer: int, _tag: int) -> None:
            self.name = f"{kind} {peer}: {tensors[0][0].item()}"
            log.append(self.name)

        def wait(self) -> None:
            log.append(f"wait for {self.name}")

    group = MagicMock(recv=partial(Work, "recv"), send=partial(Work, "send"))
    group._get_backend.return_value.supports_coalescing = False
    with (
        patch.multiple(dist, get_process_group_ranks=lambda _: [*range(10, 18)], get_rank=lambda _: 5),
        patch.object(dist, "get_backend_config", return_value="cpu:gloo"),
        patch("megatron.context_parallel.runtime.comm.transport.rendezvous"),
    ):
        transport = TorchTransport(group, "")
    transport._groups["heads", tuple(range(8))] = group
    sent, received = (first + torch.arange(3, dtype=torch.uint8).view(3, 1) for first in (0, 100))
    work = transport.all_to_all("heads", (1, 3, 5, 7), sent, received)
    assert log == ["recv 1: 100", "recv 3: 101", "recv 7: 102"]
    assert work.ends == [*(("send", rank) for rank in (17, 11, 13)), *(("receive", rank) for rank in (11, 13, 17))]
    log.clear()
    work.wait()
    sends = ["send 7: 2", "send 1: 0", "send 3: 1"]
    posted = [line for send in sends for line in (send, f"wait for {send}")]
    assert log == [*posted, "wait for recv 1: 100", "wait for recv 3: 101", "wait for recv 7: 102"]


def test_what_fails_while_it_is_under_way_is_named():
    class Work:
        waited, error = 0, None

        def wait(self) -> None:
            self.waited += 1
            if self.error:
                raise self.error

    works = [Work(), Work()]
    ends = [("receive", 1), ("send", 2)]
    batch = WorkBatch(works, "ring", ends)
    batch.wait()
    batch.wait()  # each work once
    assert [work.waited for work in works] == [1, 1]
    works[1].error = RuntimeError("connection closed")
    with pytest.raises(RuntimeError) as failed:
        WorkBatch(works, "ring", ends).wait()
    assert str(failed.value).startswith("context parallel communication failed: ")
    assert str(failed.value).endswith("waiting to send to rank 2 on channel ring: connection closed")


# -- through torch.distributed --------------------------------------------------------------------------------


def _torch_transport() -> list:
    rank = dist.get_rank()
    transport = TorchTransport(dist.group.WORLD, "the same")
    assert (transport.ranks, transport.rank) == ([0, 1], rank)
    for bad, group in (("exchange", (0, 1)), ("all_gather", (0, 1))):
        with pytest.raises(PlanError, match=r"channel 'x' of ranks \[0, 1\]: no communicator; .*declared are \[\]"):
            transport.exchange("x", [], []) if bad == "exchange" else transport.all_gather("x", group, (2, 2), [])
    transport.connect([("ring", (0, 1)), ("heads", (0, 1)), ("gather", (0, 1)), ("alone", (0,)), ("alone", (1,))])
    groups = transport._groups
    assert sorted(groups) == sorted([("alone", (rank,)), *((c, (0, 1)) for c in ("gather", "heads", "ring"))])
    assert [key for key, group in groups.items() if group is dist.group.WORLD] == [("gather", (0, 1))]
    assert len({*groups.values()}) == 4 and dist.get_process_group_ranks(groups["alone", (rank,)]) == [rank]

    got = run_rank(swapped(transport, rank, (0, 1)))
    other, into = 1 - rank, [torch.zeros(2, 3) for _ in range(2)]
    exchange = transport.exchange("ring", [(other, numbered(rank)), (other, numbered(5))], [(other, x) for x in into])
    assert (exchange.channel, exchange.ends) == ("ring", [("receive", other)] * 2 + [("send", other)] * 2)
    gathering = transport.all_gather("gather", (0, 1), (2, 2), [(numbered(rank), torch.zeros(4, 3))])
    assert (gathering.channel, gathering.ends) == ("gather", [("gather", other)])
    exchange.wait()
    gathering.wait()
    return [got, [x[1, 2].item() for x in into]]


def test_torch_transport(ranks):
    assert ranks(2, _torch_transport) == [[([0, 1], {1: 10}), [1, 5]], [([0, 1], {0: 1}), [0, 5]]]


@pytest.mark.parametrize("together", [False, True])
def test_messages_are_posted_receives_first_and_by_nccl_together(together):
    calls, group = [], MagicMock()
    group._get_backend.return_value.supports_coalescing = together
    for name in ("_start_coalescing", "_end_coalescing", "recv", "send"):
        getattr(group, name).side_effect = lambda *args, name=name: calls.append((name, *args[1:])) or MagicMock()
    x = numbered(0)
    works = post(group, [(3, x)], [(1, x), (2, x)])
    messages = [("recv", 1, 0), ("recv", 2, 0), ("send", 3, 0)]
    assert calls == ([("_start_coalescing",), *messages, ("_end_coalescing",)] if together else messages)
    assert len(works) == (1 if together else 3)
    works[0].wait()
    calls.clear()
    assert post(group, [], []) == [] == calls
