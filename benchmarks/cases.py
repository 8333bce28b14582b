"""The cases to compare: strategies of this project and peers, from the command line, and named sets of them."""

from dataclasses import dataclass, field

import torch

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.ir import RANK_PLACEMENTS, Plan
from megatron.context_parallel.strategies import Choice, head_parallel_sizes, parse_spec
from megatron.context_parallel.tokens.layout import progressions

from .peers import PEERS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SWITCH = {"yes": True, "no": False}
_ALL_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTATION = {  # suffix of a case's name, and what it changes in the trainer's arguments
    "": {},
    ", recomputed": _ALL_LAYERS,
    ", recomputed, attention kept": _ALL_LAYERS | {"recompute_whitelist": ["core_attention"]},
}


@dataclass(frozen=True)
class Workload:
    """One attention, forward and backward, shared by `ranks` ranks. `dtype` is a key of DTYPES.

    `documents` are the lengths of packed documents, `length` tokens in all; None: one document.
    """

    ranks: int
    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    documents: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    """A chosen strategy, or a peer with its options; `text` is the given text, and its name in every output.

    `placed`: the documents are placed, instead of the layout of the strategy.
    """

    text: str
    name: str
    choice: Choice | None = None  # None: a peer
    options: dict[str, object] = field(default_factory=dict)
    placed: bool = False

    @property
    def peer(self) -> bool:
        return self.choice is None

    def plans(self, problem: Workload) -> tuple[Plan, Plan]:
        """Forward and backward plan of a strategy.

        Raises:
            UsageError: a layout or number of heads or tokens that does not work.
        """
        how = {"causal": problem.causal, "heads": problem.heads, "kv_heads": problem.kv_heads}
        forward, backward = (self.choice.plan(problem.ranks, backward=b, **how) for b in (False, True))
        progressions(forward.layout, 0, problem.ranks, problem.length)
        return forward, backward


def parse_case(text: str) -> Case:
    """`peer:NAME:option=value,...`, values 8, 4x4, yes, no or a word; or the spec of a strategy, or `placed:SPEC`.

    Raises:
        UsageError: no such strategy or peer, or an option it does not have.
    """
    if not text.startswith("peer:"):
        choice = parse_spec(text.removeprefix("placed:"))
        return Case(text, choice.strategy.name, choice, placed=text.startswith("placed:"))
    name, _, rest = text.removeprefix("peer:").partition(":")
    if name not in PEERS:
        raise UsageError(f"--strategies {text}: no peer {name!r}; choose one of {', '.join(PEERS)}")
    options = {}
    for word in rest.split(",") if rest else ():
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--strategies {text}: {word!r} is not an option; write it as grid=4x4")
        options[key] = _value(value)
    return Case(text, name, None, options)


def _value(word: str) -> object:
    sizes = word.split("x")
    if all(size.isdecimal() for size in sizes):
        return int(word) if len(sizes) == 1 else tuple(map(int, sizes))
    return SWITCH.get(word, word)


def _grids(n: int) -> list[str]:
    return [f"{a}x{n // a}" for a in _divisors(n)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def preset(name: str, problem: Workload) -> list[str]:
    """The cases of a named comparison on these ranks and heads; see PRESETS."""
    n, sizes = problem.ranks, head_parallel_sizes(problem.heads, problem.kv_heads)
    match name:
        case "balance":
            return ["lightseq", "lightseq:balance=no", "ring", "ring:layout=contiguous"]
        case "overlap":
            return ["attention2d", "attention2d:overlap=no", "lightseq", "lightseq:prefetch=no"]
        case "inner-ring":
            return [f"loongtrain:inner_ring_size={w}" for w in _divisors(n)]
        case "grids":
            return [f"{name}:grid={grid}" for name in ("attention2d", "mesh") for grid in _grids(n)]
        case "placement":
            both = [d for d in _divisors(n) if 1 < d < n and d in sizes]
            return [f"loongtrain:head_parallel_size={d},placement={p}" for d in both for p in RANK_PLACEMENTS]
    raise UsageError(f"--preset {name}: unknown; choose one of {', '.join(PRESETS)}")


PRESETS = {
    "balance": "work balanced over the ranks or not (lightseq's helpers, zigzag against contiguous ring)",
    "overlap": "communication beside blocks or not (attention2d, lightseq)",
    "inner-ring": "every size of loongtrain's inner ring",
    "grids": "every grid of attention2d and mesh",
    "placement": "head-first or context-first for every head-parallel size of loongtrain",
}
