"""Memory stays bounded, and tensors that are being sent are not overwritten."""

from collections import defaultdict

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, context_parallel_attention
from megatron.context_parallel.attention import plans
from megatron.context_parallel.attention.plans import KEPT
from megatron.context_parallel.kernels.interface import Scores
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.plan.ir import AllGather, Plan, PlanError, Recv, ReduceScatter, Send, Step, T
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import units
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.runtime.comm.transport import LocalTransport, MessageQueue
from megatron.context_parallel.runtime.executor import Executor, Problem
from megatron.context_parallel.strategies import Pass, Strategy
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.placement import Placement


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_rank_holds_no_more_than_the_verifier_says(name, monkeypatch):
    held: dict[tuple[bool, int], float] = defaultdict(float)
    free = Executor._free

    def watched(self: Executor, step: int) -> None:
        free(self, step)
        chunks = [*self.held, *(key for key, waiting in self.arriving.items() for _ in waiting)]
        now = sum(units(tensor) for tensor, _ in chunks)
        key = self.plan.backward, self.rank
        held[key] = max(held[key], now)

    monkeypatch.setattr(Executor, "_free", watched)
    n, options = 12, {"head_parallel_size": 2} if name == "usp" else {}
    q = torch.randn(2 * n, 1, 12, 4, requires_grad=True)
    cp = AllRanks(n, name, **options)
    context_parallel_attention(q, q, q, cp, causal=False).sum().backward()
    for backward in (False, True):
        plan = cp.plans.of(Mask(False), (2 * n, 2 * n), 12, 12, backward=backward)
        peaks = verify(plan).peak
        for rank in range(plan.n):
            assert 0 < held[backward, rank] <= peaks[rank], f"{name}, backward {backward}, rank {rank}"


@pytest.mark.parametrize(
    "ops",
    [
        [Recv(T.KV, chunk, 1) for chunk in (1, 2, 3)],
        [Send(T.KV, 0, chunk) for chunk in (1, 2, 3)],
        [AllGather(T.KV, (0, chunk), (0, chunk), "ring") for chunk in (1, 2, 3)],
        [ReduceScatter(T.O, (0, chunk), (0, chunk), "ring") for chunk in (1, 2, 3)],
    ],
    ids=["receives", "sends", "gathers", "reductions"],
)
def test_a_rank_has_two_batches_of_a_channel_under_way(ops):
    log: list[str] = []

    class Noted:
        """A transport whose communication is complete when it is waited for."""

        def exchange(self, *_):
            log.append("start")
            return f"end {log.count('start')}"

        all_gather = exchange

        def world_rank(self, peer):
            return peer

    steps = tuple(Step((op,)) for op in ops)
    plan = Plan("own", "cyclic", Pairs.all(4), False, (steps, (), (), ()))
    q, kv = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 4)
    problem = Problem(Blocks(Mask(False), *Chunks.pair("cyclic", 4, 8), Reference()), 1, Reference(), Scores(1.0))
    executor = Executor(plan, 0, problem, Noted(), {T.Q: (q,), T.KV: (kv, kv)})
    log += executor.run()
    log += executor.results()
    assert log[:4] == ["start", "start", "end 1", "start"]
    assert {*log[4:]} == {"end 2", "end 3"}


def test_what_is_being_sent_must_not_change():
    post: dict = defaultdict(MessageQueue)
    x, into = torch.zeros(2), torch.ones(2)
    first, second = LocalTransport(0, post), LocalTransport(1, post)
    first.exchange("ring", [(1, x)], [])
    x.add_(1)
    arriving = second.exchange("ring", [], [(0, into)])
    with pytest.raises(PlanError, match="a tensor was overwritten while it was being sent"):
        arriving.wait()


def test_a_sample_of_the_plans_for_documents_is_verified(monkeypatch):
    cp, q, verified = AllRanks(2, "ring"), torch.randn(16, 1, 1, 4, requires_grad=True), []
    monkeypatch.setattr(plans, "verify", lambda plan: verified.append((len(plan.steps[0]), plan.backward)))
    for placement in (None, None, Placement([[(0, 8)], [(8, 16)]]), Placement([[(0, 4), (8, 12)], [(4, 8), (12, 16)]])):
        documents = Documents((torch.arange(16) >= 8).long().unsqueeze(0))
        how = {"documents": documents.placed(placement) if placement else documents}
        context_parallel_attention(q, q, q, cp, **how).sum().backward()
    # The first of two passes as the layout says, and of two with a placement that needs one step: nothing is sent.
    assert [backward for _, backward in verified] == [False, True] * 2 and verified[2][0] < verified[0][0]


def test_each_plan_of_a_strategy_of_ones_own_is_verified(monkeypatch):
    def hasty(at: Pass):
        for step in STRATEGIES["ring"].write(at):
            yield Step(step.comm, step.attend if at.visible_pairs(1, 0) else ())

    monkeypatch.setitem(STRATEGIES, "hasty", Strategy("hasty", ("zigzag",), hasty, {}, ("ring",)))
    cp, q = AllRanks(2, "hasty"), torch.randn(16, 1, 1, 4)
    context_parallel_attention(q, q, q, cp, documents=Documents(torch.zeros(16).long()))
    with pytest.raises(PlanError, match="rank 0, step 0: O chunk 0 ends without the block of chunk 0"):
        context_parallel_attention(q, q, q, cp, documents=Documents(torch.arange(16) // 4))


def test_plans_of_changing_documents_are_forgotten():
    cp, q = AllRanks(2, "ring"), torch.randn(16, 1, 1, 4)
    for batch in range(100):
        bounds = torch.tensor([0, 1 + batch % 14, 16])
        ids = (torch.arange(16) >= bounds[1]).long() + 2 * batch
        context_parallel_attention(q, q, q, cp, documents=Documents(ids))
        assert len(cp.plans._recent) <= KEPT
