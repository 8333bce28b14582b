"""The planner's candidates: every strategy with all promising values of its options."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from megatron.context_parallel.attention.plans import ALL_RANKS_UP_TO
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import divisors
from megatron.context_parallel.plan.ir import HEAD_FIRST, RANK_PLACEMENTS, Plan, PlanError
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.progress import tracked
from megatron.context_parallel.strategies import STRATEGIES, Choice, Strategy, rounds_of_heads
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask

ROUNDS = (2, 4, 8)  # of heads or tokens, that are tried
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Workload:
    """One attention, forward and backward, that a context group shares.

    Attributes:
        length: tokens of the sequence.
        heads: query heads of a rank, after tensor parallelism.
        kv_heads: key/value heads, likewise.
        head_dim: width of a head.
        batch: sequences.
        dtype: of the model: "bf16", "fp16" or "fp32".
        mask: without documents.

    Raises:
        UsageError: a size that is no whole number of 1 or more, key/value heads that do not divide the heads, or an
            unknown dtype.
    """

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: str = "bf16"
    mask: Mask = field(default_factory=Mask)

    def __post_init__(self) -> None:
        for name in ("length", "heads", "kv_heads", "head_dim", "batch"):
            if type(size := getattr(self, name)) is not int or size < 1:
                raise UsageError(f"workload: {name} {size!r}; need a whole number, 1 or more, such as 8")
        if self.heads % self.kv_heads:
            raise UsageError(f"workload: {self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.dtype not in DTYPES:
            raise UsageError(f"workload: dtype {self.dtype!r}; give one of {', '.join(DTYPES)}")

    def shape(self, n: int) -> Shape:
        """The sizes on one of n ranks."""
        rows = self.length // n * self.batch
        return Shape(rows, self.heads, self.kv_heads, self.head_dim, DTYPES[self.dtype].itemsize)


class Candidate(NamedTuple):
    """A strategy with its options, and its plans: forward and backward."""

    choice: Choice
    plans: tuple[Plan, ...]


class Rejected(NamedTuple):
    """A choice that cannot run, and why."""

    spec: str
    reason: str


def candidates(
    workload: Workload,
    n: int,
    q_transfer_blocks: Callable[[int], float],
    fixed: Mapping[str, Any],
    planned: bool = True,
) -> Iterator[Candidate | Rejected]:
    """All choices for n ranks, and the rejected ones. Choices with the same plans appear once.

    Args:
        workload: the attention.
        n: ranks of the context group.
        q_transfer_blocks: the time of a message of queries, in forward blocks, by head-parallel size.
        fixed: options of all strategies that are given.
        planned: of strategies that the planner considers for any mask, or else of those made for documents.
    """
    visible_pairs = cache(lambda layout, steps: workload.mask.pairs(*Chunks.pair(layout, steps, workload.length)))
    known = set()
    for size, choice in tracked([*_choices(n, q_transfer_blocks, fixed, planned)], "making plans"):
        try:
            Chunks.of(choice.layout, n, workload.length)
            plans = _both_passes(choice, n, workload, visible_pairs(choice.layout, n // size))
        except UsageError as error:
            yield Rejected(choice.spec, str(error))
            continue
        own = (choice.strategy.write, *sorted(choice.options.items())) if size < n else ()  # one rank has no steps
        same = own, choice.layout, size, choice.common.get("placement")
        if same not in known:
            known.add(same)
            wrong = _wrong(choice, plans)
            yield Rejected(choice.spec, wrong) if wrong else Candidate(choice, plans)


def _both_passes(choice: Choice, n: int, workload: Workload, visible_pairs: Pairs) -> tuple[Plan, ...]:
    sizes: dict[str, Any] = {"heads": workload.heads, "kv_heads": workload.kv_heads, "visible_pairs": visible_pairs}
    try:
        return tuple(choice.plan(n, backward=backward, **sizes) for backward in (False, True))
    except Exception as error:
        if choice.strategy.is_builtin or isinstance(error, UsageError):
            raise
        raise UsageError(_told(choice, error)) from error


def _wrong(choice: Choice, plans: tuple[Plan, ...]) -> str | None:
    """Why plans of a user's strategy are not exact attention, or None. Of large ones one rank is looked at."""
    try:
        for plan in () if choice.strategy.is_builtin else plans:
            if plan.n <= ALL_RANKS_UP_TO:  # as in a run
                verify(plan)
            else:
                plan.steps[0]
    except Exception as error:
        return _told(choice, error)
    return None


def _told(choice: Choice, error: Exception) -> str:
    kind = "" if isinstance(error, UsageError | PlanError) else f"{type(error).__name__}: "
    return f"--cp-strategy {choice.strategy.name}: {kind}{error}"


def in_rounds(found: Candidate, workload: Workload) -> Iterator[Candidate]:
    """The same choice with more rounds of heads, the fewest first, where it splits heads and computes them at once."""
    plan = found.plans[0]
    if not plan.keeps_swapped:
        return
    fits = rounds_of_heads(plan.head_parallel_size, workload.heads, workload.kv_heads)
    for rounds in ROUNDS:
        if rounds in fits:
            choice = replace(found.choice, common=found.choice.common | {"head_rounds": rounds})
            yield Candidate(choice, tuple([replace(plan, head_rounds=rounds) for plan in found.plans]))


def in_token_rounds(found: Candidate, workload: Workload, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """The same choice with more rounds of tokens, in the layout that these need, where its strategy has them."""
    if not found.choice.strategy.in_token_rounds or fixed.get("layout", "cyclic") != "cyclic":
        return
    tokens = workload.length // found.plans[0].all_ranks
    for rounds in ROUNDS:
        if workload.mask.causal and tokens % rounds == 0:
            common = found.choice.common | {"layout": "cyclic"}
            options = found.choice.options | {"token_rounds": rounds}
            plans = [replace(plan, layout="cyclic", token_rounds=rounds) for plan in found.plans]
            yield Candidate(replace(found.choice, common=common, options=options), tuple(plans))


def _choices(
    n: int, q_transfer_blocks: Callable[[int], float], fixed: Mapping[str, Any], planned: bool
) -> Iterator[tuple[int, Choice]]:
    """Choices, each with its head-parallel size."""
    # Where several have the same plans, the name that tells most comes first.
    asked = [strategy for strategy in STRATEGIES.values() if strategy.planned == planned]
    for strategy in sorted(asked, key=lambda s: ("all", "required", "optional").index(s.head_parallel)):
        for size in _head_parallel_sizes(strategy, n):
            tried = {
                name: option.values_to_try(n // size, q_transfer_blocks(size))
                for name, option in strategy.options.items()
            }
            placements = RANK_PLACEMENTS if 1 < size < n else (HEAD_FIRST,)
            for layout, placement in itertools.product(strategy.layouts, placements):
                common = dict(fixed) | {"layout": layout, "head_parallel_size": size, "placement": placement}
                common["head_rounds"] = fixed.get("head_rounds", 1) if size > 1 else 1
                if any(common[name] != value for name, value in fixed.items()):
                    continue
                if layout == strategy.layouts[0]:
                    del common["layout"]
                if size == 1 or strategy.head_parallel == "all":
                    del common["head_parallel_size"]
                if placement == HEAD_FIRST:
                    del common["placement"]
                if common["head_rounds"] == 1:
                    del common["head_rounds"]
                for values in itertools.product(*tried.values()):
                    options = dict(zip(tried, values, strict=True))
                    told = {k: v for k, v in options.items() if v != strategy.options[k].default}
                    yield size, Choice(strategy, common, told)


def _head_parallel_sizes(strategy: Strategy, n: int) -> list[int]:
    sizes = divisors(n)
    return {"all": [n], "required": sizes[1:], "optional": sizes}[strategy.head_parallel]
