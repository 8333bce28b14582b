"""Random command lines: each is accepted, or refused with one line for each error. Some that are accepted are run."""

import math
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megatron.context_parallel.cli.flag import Flag
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.strategies import COMMON, STRATEGIES
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.flags import FLAGS, Arguments

from .bench import MODEL, TRAINING

SECONDS = 20  # one command line may take
MEMORY = 12 << 30  # bytes of address space
LONGEST = 600  # characters of a refusal
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=8)
SMALL = (1, 2, 2, 4, 4, 8, 16)
NUMBERS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 48, 64, 100, 128, 256, 512, 1024, 4096)
# Flags of the parallel layout are drawn more often than others.
OFTEN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
    "use_distributed_optimizer",
    "micro_batch_size",
    "global_batch_size",
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "cp_strategy",
)
SKIPPED = {"dry_run", "config"}  # drawn apart


@dataclass
class Found:
    """The outcomes of the command lines."""

    refused: int = 0
    accepted: list[tuple[list[str], int, Arguments]] = field(default_factory=list)  # words, ranks


class Hang(BaseException):
    """A command line took more than SECONDS."""


@contextmanager
def bounded(seconds: int = SECONDS) -> Iterator[None]:
    """Raises Hang if the block takes longer than some seconds."""

    def ring(number, frame):
        raise Hang(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_line_each(error: UsageError) -> None:
    """Each refusal is one line of reasonable length, and no two are the same."""
    lines = str(error).splitlines()
    assert lines and len(lines) == len(error.args), f"not a line for each error: {error.args!r}"
    assert len({*lines}) == len(lines), f"the same line twice: {error.args!r}"
    for line in lines:
        assert line.strip() and len(line) <= LONGEST, f"{len(line)} characters: {line!r}"


# ------------------------------------------------------------------------------------------------ random draws


def _paths(data: Path) -> st.SearchStrategy[str]:
    known = (
        str(data),
        f"{data}.idx",
        str(data.parent),
        "/nowhere/at/all",
        "",
        "/dev/null",
        "/proc/self/mem",
        ".",
        "0.5",
    )
    return st.sampled_from(known) | WORDS


def _numbers() -> st.SearchStrategy[str]:
    usual = st.sampled_from(SMALL) | st.sampled_from(NUMBERS)
    return st.integers(0, 9).flatmap(lambda i: usual if i else st.integers(-2, 10**12)).map(str)


def _reals() -> st.SearchStrategy[str]:
    usual = st.sampled_from((0, 0.1, 0.25, 0.5, 0.9, 0.999, 1, 1e-5, 1e-3, 2))
    odd = st.sampled_from(("-1", "nan", "inf", "1e400", "1e-400")) | st.floats().map(repr)
    return st.integers(0, 4).flatmap(lambda i: usual.map(str) if i else odd)


def _specs() -> st.SearchStrategy[str]:
    names = st.sampled_from([*STRATEGIES])
    options = sorted({*COMMON, *(option for strategy in STRATEGIES.values() for option in strategy.options)})
    values = st.sampled_from(("1", "2", "4", "2x2", "1x4", "4x1", "2,2", "zigzag", "cyclic", "contiguous", "true", "x"))
    given_options = st.lists(st.tuples(st.sampled_from(options), values).map("=".join), min_size=1, max_size=2)
    with_options = st.tuples(names, given_options.map(",".join)).map(":".join)
    two_passes = st.tuples(names | with_options, names | with_options).map("+".join)
    of_layers = names | with_options | names.map("{}*2".format) | two_passes
    by_layer = st.lists(of_layers, min_size=2, max_size=3).map(",".join)
    wrong = WORDS | st.sampled_from(("nowhere.py:ring", "os:ring", "ring:", ":", "a:b:c:d"))
    return names | names | with_options | two_passes | by_layer | wrong


def _values(flag: Flag, data: Path) -> st.SearchStrategy[list[str]]:
    """Words after a flag: mostly of its type."""
    if flag.kind is bool:
        return st.just([])
    if flag.name == "cp_strategy":
        one = _specs()
    elif flag.choices:
        one = st.sampled_from(flag.choices)
    elif flag.kind is int:
        one = _numbers()
    elif flag.kind is float:
        one = _reals()
    elif flag.kind is tuple:
        one = st.tuples(_numbers(), st.sampled_from((",", "x", " ", "")), _numbers()).map("".join)
    else:
        one = _paths(data)
    if flag.kind is list:
        return st.lists(one, max_size=3)
    return st.tuples(st.integers(0, 19), one, WORDS).map(lambda drawn: [drawn[2] if drawn[0] == 0 else drawn[1]])


def _flag(data: Path) -> st.SearchStrategy[list[str]]:
    others = [name for name in FLAGS if name not in SKIPPED]
    names = st.sampled_from(OFTEN) | st.sampled_from(others)
    known = names.flatmap(lambda name: _values(FLAGS[name], data).map(lambda values: [FLAGS[name].option, *values]))
    wrong = st.tuples(st.sampled_from([f.option for f in FLAGS.values()]), WORDS).map(lambda x: ["".join(x)])
    return st.integers(0, 39).flatmap(lambda i: wrong if i == 0 else known)


def _parallel(sizes: tuple[int, int, int, int]) -> tuple[list[str], int]:
    """Words for tensor-, pipeline-, context- and data-parallel sizes, and how many ranks these are."""
    flags = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
    return [word for flag, size in zip(flags, sizes, strict=False) for word in (flag, str(size))], math.prod(sizes)


def command_lines(data: Path) -> st.SearchStrategy[tuple[list[str], int]]:
    """A tiny run with parallel sizes and some more flags, and its number of ranks."""
    base = [*f"{MODEL} {TRAINING} --data-path {data}".split()]
    extra = st.lists(_flag(data), max_size=5).map(lambda flags: [word for flag in flags for word in flag])
    dry = st.integers(0, 9).map(lambda i: ["--dry-run"] if i == 0 else [])
    size = st.sampled_from((1, 1, 2, 2, 4))
    fitting = st.tuples(size, size, size, size).filter(lambda sizes: math.prod(sizes) <= 8).map(_parallel)
    layout = st.integers(0, 3).flatmap(
        lambda i: fitting if i else st.tuples(st.just([]), st.sampled_from((1, 2, 3, 4, 8, 64)))
    )
    return st.tuples(layout, extra, dry).map(lambda parts: (base + parts[0][0] + parts[1] + parts[2], parts[0][1]))


# ------------------------------------------------------------------------------------------------- the checks


def check_flags(count: int, number: int, data: Path, found: Found) -> None:
    """Checks the arguments of `count` command lines; `found` counts the outcomes.

    Raises the error of hypothesis, which has the smallest failing command line.
    """

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(command_lines(data))
    def is_refused_or_accepted(line: tuple[list[str], int]) -> None:
        words, ranks = line
        os.environ["WORLD_SIZE"] = str(ranks)
        try:
            with bounded():
                found.accepted.append((words, ranks, parse_args(words)))
        except UsageError as error:
            one_line_each(error)
            found.refused += 1

    is_refused_or_accepted()
