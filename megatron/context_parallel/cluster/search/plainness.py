"""Which of several choices that are predicted to be about equally fast is taken: the plainest."""

from collections.abc import Mapping

from megatron.context_parallel.strategies import Choice, parse_spec

SURE = 0.03  # of the time: a more complicated choice must save more, because predictions are off by as much
PLAINEST_FIRST = ("ring", "ulysses", "usp", "allgather", "lightseq", "loongtrain", "attention2d", "mesh")


def plainest(seconds: Mapping[str, float]) -> str:
    """The plainest of the specs that take at most 1 + `SURE` times as long as the fastest; of these, the fastest."""
    least = min(seconds.values())
    near = [spec for spec, time in seconds.items() if time <= (1 + SURE) * least]
    return min(near, key=lambda spec: (_complexity(parse_spec(spec)), seconds[spec]))


def reason(best: str, fastest: str, found: int) -> str:
    """Why `best` is taken of so many choices; it is the fastest, or the plainest of those that are near it."""
    if best == fastest:
        return f"the fastest of {found}"
    return f"the plainest of {found} within {SURE:.0%} of the fastest, {fastest}"


def _complexity(choice: Choice) -> tuple[bool, int]:
    """Whether it mixes two strategies; the place of its strategy in `PLAINEST_FIRST` plus the number of its options."""
    name = choice.strategy.name
    place = PLAINEST_FIRST.index(name) if name in PLAINEST_FIRST else len(PLAINEST_FIRST)
    return choice.for_backward is not None, place + len(choice.common) + len(choice.options)
