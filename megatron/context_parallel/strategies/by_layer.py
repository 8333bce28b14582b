"""A strategy for each layer: a list of specs, starting with the first layer.

spec                    ring: all layers
spec,spec,...           ring,ring,ulysses: of 3 layers
spec*4,spec*2           ring*4,mesh:grid=2x4,q_transfer_blocks=2.5*2: of 4 layers in a row, then of 2

After a comma, NAME= continues the options of the spec before it.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import divisors

from .spec import AUTO, BETWEEN_LAYERS, Choice, parse_spec

COMM_TYPES = {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses"}  # Transformer Engine's names
BOTH = "a2a+p2p"  # usp, with two hierarchical sizes
_COUNTED = re.compile(r"(?P<spec>.+?)(\*(?P<count>[1-9][0-9]*))?", re.DOTALL)


def choose_by_layer(specs: str, layers: int, n: int | None = None, /, **options: object) -> tuple[Choice, ...]:
    """The strategy of each layer. Strategies without a given layout get the first one that all of them support.

    Args:
        specs: as above.
        layers: the number of layers of the whole model.
        n: as for `parse_spec`.
        options: as for `parse_spec`, for the strategies of all layers.

    Raises:
        UsageError: `parse_spec` rejects a spec, the number of layers differs, or no layout works with all of them.
    """
    parts = [_COUNTED.fullmatch(part) for part in BETWEEN_LAYERS.split(specs)]
    texts = [part["spec"] if part else "" for part in parts]
    counts = [int(part["count"] or 1) if part else 1 for part in parts]
    if texts == [specs]:
        return (parse_spec(specs, n, **options),) * layers
    if AUTO in texts:
        raise UsageError(f"--cp-strategy {specs}: {AUTO} chooses one strategy for all layers; give only {AUTO}")
    if sum(counts) != layers:
        works = f"{texts[0]}*{layers - 1},{texts[-1]}" if layers > 1 else texts[0]
        raise UsageError(
            f"--cp-strategy {specs}: is for {sum(counts)} layers, but --num-layers is {layers}; give {works}"
        )
    choices = _with_one_layout(specs, [parse_spec(text, n, **options) for text in texts], n)
    return tuple(choice for choice, count in zip(choices, counts, strict=True) for _ in range(count))


def _with_one_layout(specs: str, choices: list[Choice], n: int | None) -> list[Choice]:
    possible = [_layouts(choice) for choice in choices]
    in_all = set(possible[0]).intersection(*possible)
    shared = [layout for layout in possible[0] if layout in in_all]
    if not shared:
        told = {
            f"{choice.strategy.name}: {' or '.join(layouts)}" for choice, layouts in zip(choices, possible, strict=True)
        }
        why = f"all layers need a common layout, and these strategies have none ({'; '.join(sorted(told))})"
        raise UsageError(f"--cp-strategy {specs}: {why}; give strategies that have one, such as ring and ulysses")
    return [parse_spec(choice, n, layout=shared[0]) for choice in choices]


def _layouts(choice: Choice) -> list[str]:
    """The possible layouts of a choice: the given one, or all of its strategy."""
    given = choice.common.get("layout")
    own = [given] if given else [*choice.strategy.layouts]
    return [layout for layout in own if not choice.for_backward or layout in _layouts(choice.for_backward)]


def distinct(choices: Sequence[Choice]) -> list[Choice]:
    """Each of the choices once, in the order of their first layers."""
    return [*{choice.spec: choice for choice in choices}.values()]


def written(choices: Sequence[Choice]) -> str:
    """The specs that give these choices."""
    if len(distinct(choices)) == 1:
        return choices[0].spec
    parts = []
    for spec, same in groupby(choice.spec for choice in choices):
        parts.append(f"{spec}*{len([*same])}")
    return ",".join(parts)


def check_same_tokens(choices: Sequence[Choice], n: int) -> None:
    """Raise UsageError for strategies with which a rank would hold different tokens in some layers.

    Raises:
        UsageError: their layouts or placements differ, or one does not fit n ranks.
    """
    first, *others = distinct(choices)
    for other in others:
        if _tokens(first, n) != _tokens(other, n):
            why = f"a rank would hold different tokens than with {first.spec}"
            raise UsageError(f"--cp-strategy {other.spec}: {why}; give both the same layout and placement")


def _tokens(choice: Choice, n: int) -> tuple[str, list[int]]:
    """The layout, and the chunk of each of n ranks."""
    plan = choice.plan(n)
    return choice.layout, [plan.chunk_of(rank) for rank in range(n)]


def specs_given(
    strategy: str | None, types: Sequence[str] | None, sizes: Sequence[int] | None, n: int, layers: int
) -> str:
    """The specs of a command line; by default "ring".

    Args:
        strategy: `--cp-strategy`.
        types: Megatron's `--cp-comm-type`: "p2p", "all_gather", "a2a" or "a2a+p2p", for all layers or each.
        sizes: `--hierarchical-context-parallel-sizes`: ranks that split the heads, and ranks of a ring.
        n: the number of context ranks.
        layers: the number of layers of the whole model.

    Raises:
        UsageError: strategy and types differ, a type is unknown, or the number of types or ranks is wrong.
    """
    if not types:
        return strategy or "ring"
    named = _specs_of(types, sizes, n)
    given = f"--cp-comm-type {' '.join(types)}"
    if len(named) not in (1, layers):
        raise UsageError(f"{given}: {len(types)} values for {layers} layers; give one, or one for each")
    specs = ",".join(named)
    if strategy == AUTO or (strategy and choose_by_layer(strategy, layers) != choose_by_layer(specs, layers)):
        raise UsageError(f"--cp-strategy {strategy}: {given} means {specs}; give only one of the two")
    return specs


def _specs_of(types: Sequence[str], sizes: Sequence[int] | None, n: int) -> list[str]:
    """The spec of each of Megatron's types."""
    smallest = min([d for d in divisors(n) if d > 1], default=1)
    works = f"--hierarchical-context-parallel-sizes {smallest} {n // smallest}"
    told = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes or ()))}"
    if unknown := [name for name in types if name not in (*COMM_TYPES, BOTH)]:
        raise UsageError(f"--cp-comm-type {unknown[0]}: unknown; choose {' or '.join((*COMM_TYPES, BOTH))}")
    if BOTH not in types:
        if sizes:
            raise UsageError(f"{told}: needs --cp-comm-type {BOTH}; add that or leave this out")
        return [COMM_TYPES[name] for name in types]
    if not sizes:
        raise UsageError(f"--cp-comm-type {BOTH}: needs the numbers of ranks per head group and ring; give {works}")
    if len(sizes) != 2 or sizes[0] * sizes[1] != n:
        raise UsageError(f"{told}: must be two numbers whose product is --context-parallel-size {n}; give {works}")
    specs = COMM_TYPES | {BOTH: f"usp:head_parallel_size={sizes[0]}"}
    return [specs[name] for name in types]
