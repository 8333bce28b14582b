"""The declaration of a strategy: name, layouts, options, channels, and a function that yields the steps of one rank."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import Option, divisors, options_of
from megatron.context_parallel.plan.form import wrong_block
from megatron.context_parallel.plan.ir import HEAD_FIRST, RANK_PLACEMENTS, Attend, Plan, PlanError, Step, Steps, T
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import Chunks

from .declaration import FLAGS, check_declaration

MOST_STEPS = 100_000  # of a rank; a loop that does not end yields more


@dataclass(frozen=True)
class Pass:
    """One pass of an attention, seen from one rank. A strategy writes the steps of this rank.

    Attributes:
        rank: the rank. It owns chunk `rank`.
        n: the number of ranks.
        visible_pairs: `visible_pairs(q, kv)` says whether query chunk q sees anything of key/value chunk kv under the
            mask.
        backward: whether it is the backward pass.
        kv_ratio: key/value heads per query head.
    """

    rank: int
    n: int
    visible_pairs: Pairs
    backward: bool
    kv_ratio: float = 1.0

    @property
    def query(self) -> T:
        """The tensor that is sent with the queries of a chunk."""
        return T.QDO if self.backward else T.Q

    @property
    def result(self) -> T:
        """The partial result of a query chunk."""
        return T.DQ if self.backward else T.O


@dataclass(frozen=True)
class Strategy:
    """A registered strategy.

    Attributes:
        name: its `--cp-strategy` value.
        layouts: the layouts that it supports; the first is its default.
        write: `write(at: Pass, **options)` yields the steps of one rank.
        options: its options by name.
        channels: the channels of its messages and reduce-scatters. An all-gather may use others.
        head_parallel: "optional": any size; "required": 2 or more; "all": the heads are split over all ranks.
        planned: whether the planner considers it for any mask. It considers the others for packed documents only.
        period: rank r + `period` does what rank r does, with all ranks and chunks further, if the mask allows. It is a
            number, or a function of the same arguments as `write` that returns one, or the period and width of a
            `Shift`. None: not known; steps are compared when needed.
        in_token_rounds: whether its option `token_rounds` is that of `Plan`; another strategy's means what it says.
    """

    name: str
    layouts: tuple[str, ...]
    write: Callable[..., Iterable[Step]]
    options: dict[str, Option]
    channels: tuple[str, ...]
    head_parallel: Literal["optional", "required", "all"] = "optional"
    planned: bool = True
    period: int | Callable[..., int | tuple[int, int] | None] | None = None
    in_token_rounds: bool = False

    @property
    def is_builtin(self) -> bool:
        """Whether it is one of this package's, not of a user. `wraps` copies the name of a module, not its file."""
        return Path(inspect.getfile(self.write)).parent == Path(__file__).parent

    def with_current_names(self, options: dict[str, Any]) -> dict[str, Any]:
        """`options` by their current names. Raises UsageError if an option is given under both names."""
        every = [option for strategy in STRATEGIES.values() for option in strategy.options.values()]
        today = {option.formerly: option.name for option in every if option.formerly}
        found = {}
        for given, value in options.items():
            name = given if given in self.options else today.get(given, given)
            if name != given and name in options:
                raise UsageError(f"--cp-strategy {self.name}: {given} is the former name of {name}; leave one out")
            found[name] = value
        return found

    def parse_options(self, options: dict[str, object], n: int | None = None) -> dict[str, object]:
        """The values of `options`, each a text or a value. Raises UsageError for an unknown option."""
        if unknown := options.keys() - self.options.keys():
            name = min(unknown)
            own = ", ".join(self.options) or "none"
            if others := [other for other in STRATEGIES.values() if name in other.options]:
                shown = others[0].options[name].as_flag(options[name])
                fits = [other.name for other in others]
                raise UsageError(f"{shown}: not an option of {self.name}; give --cp-strategy {' or '.join(fits)}")
            raise UsageError(f"--cp-strategy {self.name}: no option {name}; it has {own}")
        return {name: self.options[name].parse(given, n) for name, given in options.items()}

    def plan(
        self,
        n: int,
        *,
        layout: str | None = None,
        causal: bool = True,
        visible_pairs: Pairs | None = None,
        backward: bool = False,
        head_parallel_size: int | None = None,
        placement: str = HEAD_FIRST,
        head_rounds: int = 1,
        partials_in_16_bits: bool = False,
        heads: int | None = None,
        kv_heads: int | None = None,
        **options: object,
    ) -> Plan:
        """The plan of one pass on n ranks. The steps of a rank are written when they are first accessed.

        Args:
            n: the number of context ranks.
            layout: default: the strategy's own.
            causal: for a causal mask; otherwise for a full one.
            visible_pairs: the pairs of chunks that the mask does not empty; default: by `causal`. It has a chunk for
                each rank of the steps, n / head_parallel_size.
            backward: for the backward pass.
            head_parallel_size: the strategy runs on n / head_parallel_size ranks for a part of the heads; default 1,
                or n for a strategy that splits the heads over all ranks.
            placement: which ranks are neighbours: those that share tokens ("head-first") or heads ("context-first").
            head_rounds: a rank swaps and computes its heads in so many parts, one after the other. It splits them as a
                head-parallel size of head_parallel_size * head_rounds would.
            partials_in_16_bits: the steps send partials in the model's dtype; see `Plan`.
            heads: query heads of the model, or of a tensor-parallel rank; default: enough for any head-parallel size.
            kv_heads: key/value heads; default: as many as `heads`.
            options: the options that the strategy declares.

        Raises:
            UsageError: the strategy does not support a layout, a size or an option.
        """
        layout = layout or self.layouts[0]
        if layout not in self.layouts:
            raise UsageError(f"--cp-layout {layout}: not supported by {self.name}; choose {' or '.join(self.layouts)}")
        if placement not in RANK_PLACEMENTS:
            raise UsageError(f"--cp-placement {placement}: unknown; choose {' or '.join(RANK_PLACEMENTS)}")
        if type(n) is not int or n < 1:
            raise UsageError(f"{n!r} ranks: need a whole number, 1 or more, such as 4")
        size = self._head_parallel_size(n, head_parallel_size, heads, kv_heads)
        _check_rounds(head_rounds, size, heads, kv_heads)
        if visible_pairs is None:
            from megatron.context_parallel.tokens.mask import Mask  # imports torch, which only plans need

            visible_pairs = Mask(causal).pairs(*Chunks.pair(layout, n // size, 4 * n // size))
        ratio = kv_heads / heads if heads and kv_heads else 1.0
        options = self.parse_options(self.with_current_names(options), n)
        first = Pass(0, n // size, visible_pairs, backward, ratio)
        steps = self.write(first, **options)
        if not isinstance(steps, Iterable):
            raise UsageError(f"strategy {self.name}: its function returns {steps!r}; yield each Step")
        next(iter(steps), None)  # checks first, steps later
        asked = options.get("token_rounds", 1) if self.in_token_rounds else 1
        token_rounds = _checked_token_rounds(asked, size, layout, head_rounds)
        period, width = self._period(first, options)
        return Plan(
            self.name,
            layout,
            visible_pairs,
            backward,
            Steps(n // size, partial(self._write, n // size, visible_pairs, backward, ratio, options)),
            channels=self.channels,
            head_parallel_size=size,
            placement=placement,
            head_rounds=head_rounds,
            partials_in_16_bits=partials_in_16_bits,
            period=period,
            width=width,
            token_rounds=token_rounds,
        )

    def _period(self, first: Pass, options: dict[str, object]) -> tuple[int | None, int]:
        """The declared period and width. A period that does not divide the ranks is none."""
        declared = self.period(first, **options) if callable(self.period) else self.period
        period, width = declared if isinstance(declared, tuple) else (declared, 1)
        if period is None:
            return None, 1
        numbers = type(period) is int and type(width) is int and period > 0 and width > 0
        if not numbers or (width > 1 and (width * width != first.n or period % width)):
            raise UsageError(
                f"strategy {self.name}: period {declared!r} on {first.n} ranks; give 1 or more, or None; with a width, "
                "its square is the number of ranks, and the period a multiple of it"
            )
        return (None, 1) if period < first.n and first.n % period else (period, width)

    def _write(
        self, n: int, visible_pairs: Pairs, backward: bool, kv_ratio: float, options: dict[str, object], rank: int
    ) -> tuple[Step, ...]:
        """One rank's steps, without blocks that the mask empties and without empty steps."""
        steps: list[Step] = []
        for count, step in enumerate(self.write(Pass(rank, n, visible_pairs, backward, kv_ratio), **options)):
            if count == MOST_STEPS:
                raise PlanError(f"rank {rank}: {self.name} yields more than {MOST_STEPS} steps; end its loop")
            if not isinstance(step, Step) or not isinstance(step.attend, tuple):
                steps.append(step)  # `verify` says what is wrong with it
                continue
            blocks = tuple(block for block in step.attend if self._is_left(block, visible_pairs))
            if step.comm or blocks:
                steps.append(step if len(blocks) == len(step.attend) else Step(step.comm, blocks))
        return tuple(steps)

    def _is_left(self, block: Attend, visible_pairs: Pairs) -> bool:
        """Whether a block stays in a plan: it computes something, or is malformed, so that `verify` says why."""
        if self.is_builtin or not wrong_block(block, visible_pairs.n):
            return visible_pairs.any(block.q_chunks, block.kv_chunks)
        return not isinstance(block, Attend) or () not in (block.q_chunks, block.kv_chunks)

    def _head_parallel_size(self, n: int, given: int | None, heads: int | None, kv_heads: int | None) -> int:
        size = given if given is not None else n if self.head_parallel == "all" else 1
        flag = f"--cp-head-parallel-size {size}"
        if type(size) is not int or size < 1 or n % size:
            sizes = " or ".join(map(str, divisors(n)))
            raise UsageError(f"{flag}: does not divide {n} context ranks; give --cp-head-parallel-size {sizes}")
        if self.head_parallel == "all" and size < n:
            raise UsageError(f"{flag}: {self.name} splits the heads over all {n} context ranks; give {n}, or usp")
        if self.head_parallel == "required" and size == 1 and n > 1:
            raise UsageError(f"--cp-strategy {self.name}: needs --cp-head-parallel-size 2 or more; for 1, give ring")
        if heads and size not in (fits := head_parallel_sizes(heads, kv_heads or heads)):
            best = max(d for d in fits if n % d == 0)
            other = "usp" if best > 1 else "ring"  # the others need 2 or more
            changes = self.head_parallel == "all" or (self.head_parallel == "required" and best == 1)
            give = f"--cp-strategy {other} " if changes else ""
            raise UsageError(
                f"{flag}: cannot split {heads} heads with {kv_heads} key/value heads, as "
                f"{', '.join(map(str, fits))} can; give {give}--cp-head-parallel-size {best}"
            )
        return size


def _check_rounds(rounds: int, size: int, heads: int | None, kv_heads: int | None) -> None:
    """Raises UsageError unless `size` ranks can compute the heads in so many rounds."""
    flag = f"--cp-head-rounds {rounds}"
    if type(rounds) is not int or rounds < 1:
        raise UsageError(f"{flag}: need a whole number, 1 or more, such as 4")
    if rounds > 1 and size == 1:
        raise UsageError(f"{flag}: needs --cp-head-parallel-size 2 or more; for 1, give --cp-head-rounds 1")
    if not heads:
        return
    fits = rounds_of_heads(size, heads, kv_heads or heads)
    if rounds not in fits:
        raise UsageError(
            f"{flag}: cannot split the {heads // size} heads of a rank, of {heads} with {kv_heads} key/value heads; "
            f"give --cp-head-rounds {' or '.join(map(str, fits))}"
        )


def _checked_token_rounds(rounds: Any, size: int, layout: str, head_rounds: int) -> int:
    """The rounds of tokens; one if no head is swapped. Raises UsageError for a layout or rounds that do not fit."""
    if rounds > 1 and layout != "cyclic":
        raise UsageError(f"--cp-token-rounds {rounds}: does not work with --cp-layout {layout}; give cyclic")
    if rounds > 1 and head_rounds > 1:
        raise UsageError(
            f"--cp-token-rounds {rounds}: does not work with --cp-head-rounds {head_rounds}; leave one out"
        )
    return rounds if size > 1 else 1


def rounds_of_heads(size: int, heads: int, kv_heads: int) -> list[int]:
    """The numbers of rounds in which each of `size` head-parallel ranks can compute its heads, ascending."""
    return [parts // size for parts in head_parallel_sizes(heads, kv_heads) if parts % size == 0]


def head_parallel_sizes(heads: int, kv_heads: int) -> list[int]:
    """The head-parallel sizes that split the heads of a (tensor-parallel) rank, ascending."""
    return [d for d in range(1, heads + 1) if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)]


STRATEGIES: dict[str, Strategy] = {}


def _check_options(name: str, options: dict[str, Option]) -> None:
    """Raises UsageError if an option of strategy `name` cannot have its name or its flag, which same names share."""
    of_plans = inspect.signature(Strategy.plan).parameters
    for option in options.values():
        said = f"strategy {name}: option {option.name}"
        if option.name in of_plans:
            raise UsageError(f"{said}: every strategy has it; choose another name")
        if option.name in FLAGS:
            raise UsageError(f"{said}: the trainer has another cp_{option.name}; choose another name")
        for other in STRATEGIES.values():
            same = other.options.get(option.name)
            if same and (same.kind is bool) != (option.kind is bool):
                kind = "a switch" if same.kind is bool else "no switch"
                raise UsageError(f"{said}: {option.option} is {kind} of {other.name}; choose another name")


def register(
    name: str,
    layouts: tuple[str, ...],
    channels: tuple[str, ...] = ("ring",),
    head_parallel: Literal["optional", "required", "all"] = "optional",
    planned: bool = True,
    period: int | Callable[..., int | tuple[int, int] | None] | None = None,
    in_token_rounds: bool = False,
) -> Callable[[Callable[..., Iterable[Step]]], Strategy]:
    """Decorator: registers a function that yields the steps of one rank as `--cp-strategy name`.

    Args:
        name: the value of `--cp-strategy`.
        layouts: the layouts that it supports; the first is its default.
        channels: the channels of its messages and reduce-scatters.
        head_parallel: as in `Strategy`.
        planned: as in `Strategy`.
        period: as in `Strategy`.
        in_token_rounds: as in `Strategy`.

    Raises:
        UsageError: the name is taken or no name, a layout is unknown, a channel is no name or that of head swaps,
            another argument is not as in `Strategy`, the signature is not that of a strategy, or an option has a name
            that it cannot have.
    """

    def add(write: Callable[..., Iterable[Step]]) -> Strategy:
        check_declaration(name, layouts, channels, head_parallel, period)
        if name in STRATEGIES:
            raise UsageError(f"strategy {name}: the name is taken; register it under another")
        options = options_of(write)
        _check_options(name, options)
        rounds = options.get("token_rounds")
        if in_token_rounds and (head_parallel != "all" or not rounds or rounds.kind is not int):
            needs = 'head_parallel="all" and an option token_rounds: Annotated[int, ...] = 1'
            raise UsageError(f"strategy {name}: in_token_rounds needs {needs}")
        strategy = Strategy(
            name, tuple(layouts), write, options, tuple(channels), head_parallel, planned, period, in_token_rounds
        )
        STRATEGIES[name] = strategy
        return strategy

    return add
