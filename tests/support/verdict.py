"""Whether a plan is refused or right: whatever `verify` lets pass must end and compute exact attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from megatron.context_parallel import STRATEGIES, AllRanks, context_parallel_attention
from megatron.context_parallel.attention.plans import Plans
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.plan.ir import Plan, PlanError
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.mask import Mask
from tests.support.dense import dense_attention
from tests.support.waiting import stuck


class _Given(Plans):
    """Those of a strategy, but for the plan that is given for its pass."""

    given: Plan | None = None

    def of(self, *args, backward: bool) -> Plan:
        if self.given and self.given.backward == backward:
            return self.given
        return super().of(*args, backward=backward)


@dataclass(frozen=True)
class Subject:
    """A strategy on n ranks, a mask over a few tokens, and what exact attention makes of them."""

    name: str
    n: int
    layout: str | None = None
    options: dict = field(default_factory=dict)
    mask: Mask = field(default_factory=Mask)

    @property
    def length(self) -> int:
        return 4 * self.n

    @cached_property
    def ranks(self) -> AllRanks:
        ranks = AllRanks(self.n, self.name, self.layout, **self.options)
        ranks.plans = _Given(ranks.choice, self.n)
        return ranks

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Queries, keys, values and the output gradient, [length, 1, heads, 4] in float64."""
        made = torch.Generator().manual_seed(1)
        return [torch.randn(self.length, 1, heads, 4, generator=made, dtype=torch.float64) for heads in (4, 2, 2, 4)]

    @cached_property
    def exact(self) -> list[torch.Tensor]:
        first, end = self.mask.seen(torch.arange(self.length))
        at = torch.arange(self.length)
        seen = (at >= first.unsqueeze(2)) & (at < end.unsqueeze(2))
        return self._results(lambda q, k, v: dense_attention(q, k, v, seen, scale=0.5)[0])

    def plan(self, backward: bool) -> Plan:
        return self.ranks.plans.of(self.mask, (self.length, self.length), 4, 2, backward=backward)

    def computed(self, plan: Plan) -> list[torch.Tensor]:
        """Output and gradients of queries, keys and values, with `plan` for its pass."""
        how = {"causal": self.mask.causal, "window": self.mask.window, "documents": self.mask.documents}
        self.ranks.plans.given = plan
        try:
            return self._results(
                lambda *x: context_parallel_attention(*x, self.ranks, scale=0.5, kernel=Reference(), **how)
            )
        finally:
            self.ranks.plans.given = None

    def _results(self, attend: Callable) -> list[torch.Tensor]:
        *inputs, dout = self.tensors
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def subjects() -> list[Subject]:
    packed = Mask(documents=Documents(torch.arange(16) // 5))
    alone = [name for name, strategy in STRATEGIES.items() if strategy.head_parallel == "optional"]
    cases = [Subject(name, n) for name in alone for n in (2, 3, 4, 5)]
    cases += [Subject(name, 4, "contiguous", mask=packed) for name in ("ring", "lightseq", "loongtrain")]
    cases += [Subject("ring", 5, "contiguous", mask=Mask(True, (3, 0))), Subject("lightseq", 5, mask=Mask(False))]
    cases += [Subject("attention2d", 4, options={"overlap": False}), Subject("ring", 4, "contiguous")]
    cases += [Subject("mesh", 4, options={"grid": (2, 2)}, mask=packed)]
    cases += [Subject("usp", n, layout, {"head_parallel_size": 2}) for n, layout in ((4, "zigzag"), (6, "contiguous"))]
    cases += [Subject("loongtrain", 4, options={"inner_ring_size": 1})]
    cases += [Subject("lightseq", 5, options={"prefetch": False})]
    return cases


def judge(plan: Plan, subject: Subject) -> str:
    """Says "refused" or "right".

    Raises:
        AssertionError: a plan that passed and hangs, or computes something else.
    """
    try:
        verify(plan)
    except PlanError as error:
        assert "\n" not in str(error)
        return "refused"
    waiting = stuck(plan, one_queue=False)
    assert not waiting, f"{plan.name}: verified, and hangs: {waiting}"
    for what, got, want in zip(("output", "dq", "dk", "dv"), subject.computed(plan), subject.exact, strict=True):
        error = (got - want).abs().max().item()
        assert error < 1e-12, f"{plan.name}: verified, and {what} is off by {error:.1e}"
    return "right"
