"""What keeps memory bounded and sent tensors whole."""

from collections import defaultdict

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, context_parallel_attention
from megatron.context_parallel.context import REMEMBERED
from megatron.context_parallel.executor import Executor
from megatron.context_parallel.mask import Documents, Mask
from megatron.context_parallel.plan.ir import PlanError
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import units
from megatron.context_parallel.transport import LocalTransport


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
        plan = cp.plan(Mask(False), (2 * n, 2 * n), 12, 12, backward=backward)
        peaks = verify(plan).peak
        for rank in range(plan.n):
            assert 0 < held[backward, rank] <= peaks[rank], f"{name}, backward {backward}, rank {rank}"


def test_what_is_being_sent_must_not_change():
    post: dict = defaultdict(list)
    x, into = torch.zeros(2), torch.ones(2)
    first, second = LocalTransport(0, post), LocalTransport(1, post)
    first.exchange("ring", [(1, x)], [])
    x.add_(1)
    arriving = second.exchange("ring", [], [(0, into)])
    with pytest.raises(PlanError, match="a tensor was overwritten while it was being sent"):
        arriving.wait()


def test_plans_of_changing_documents_are_forgotten():
    cp, q = AllRanks(2, "ring"), torch.randn(16, 1, 1, 4)
    for batch in range(100):
        bounds = torch.tensor([0, 1 + batch % 14, 16])
        ids = (torch.arange(16) >= bounds[1]).long() + 2 * batch
        context_parallel_attention(q, q, q, cp, documents=Documents(ids))
        assert len(cp._recent) <= REMEMBERED
