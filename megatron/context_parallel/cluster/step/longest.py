"""The longest sequence that fits a device, by bisection of the memory of a step."""

import math
from dataclasses import replace
from typing import NamedTuple

from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.layout import granularity

from .fit import Change, bytes_needed, changes_to_fit
from .model_shape import ModelShape
from .train_config import TrainConfig


class Longest(NamedTuple):
    """The longest sequence that fits: its tokens and the bytes of a rank; 0 tokens if none fits.

    Attributes:
        bytes: with no tokens, those of the shortest sequence.
        changes: what was changed for it.
    """

    tokens: int
    bytes: int
    changes: tuple[Change, ...] = ()


def longest(model: ModelShape, run: TrainConfig, room: float) -> Longest:
    """The longest sequence with which a rank needs at most `room` bytes; `run` says all but its length.

    It is a multiple of `shortest`, and no longer than a learned position table.
    """
    each = shortest(run)

    def needed(multiple: int) -> int:
        return bytes_needed(model, replace(run, seq_length=multiple * each))

    most = model.positions // each if model.positions else None
    fits, too_long = 0, 1
    while (most is None or too_long <= most) and needed(too_long) <= room:
        fits, too_long = too_long, 2 * too_long
    too_long = too_long if most is None else min(too_long, most + 1)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if needed(middle) <= room:
            fits = middle
        else:
            too_long = middle
    return Longest(fits * each, needed(max(fits, 1)))


def longest_with_advice(model: ModelShape, run: TrainConfig, room: float) -> list[Longest]:
    """The longest sequence of a run, and that with the first changes with which a longer one fits, if there are any."""
    found = longest(model, run, room)
    each = shortest(run)
    if model.positions and found.tokens + each > model.positions:
        return [found]
    changes = changes_to_fit(model, replace(run, seq_length=found.tokens + each), room)
    if not changes:
        return [found]
    for change in changes:
        run = replace(run, **change.fields)
    return [found, longest(model, run, room)._replace(changes=(*changes,))]


def shortest(run: TrainConfig) -> int:
    """The fewest tokens that the layout and sequence-parallel ranks can split, whose multiples they split too."""
    layout = parse_spec(run.cp_strategy).layout
    sharers = run.tensor_model_parallel_size if run.sequence_parallel else 1
    return run.context_parallel_size * math.lcm(granularity(layout), sharers)
