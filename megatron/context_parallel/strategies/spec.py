"""Specs: a text for a strategy and its options, `mesh:grid=4x4`, the same in flags, tools and Python.

name                              ring
name:option=value,...             loongtrain:head_parallel_size=4,inner_ring_size=2
module:name                       my_package.my_module:tokenring:hops=2
file:name                         my_file.py:tokenring
spec+spec                         mesh:grid=2x8+mesh:grid=4x4, the second for the backward pass
"""

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import Option, show
from megatron.context_parallel.plan.ir import RANK_PLACEMENTS, Plan
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import LAYOUTS

from .declaration import AUTO
from .registry import STRATEGIES, Strategy

# Options that every strategy has.
COMMON = {
    option.name: option
    for option in (
        Option("layout of the tokens over the ranks; default: that of the strategy", choices=LAYOUTS, name="layout"),
        Option("number of ranks that split the heads", 2, name="head_parallel_size", kind=int),
        Option("number of rounds in which a rank swaps and computes its heads", 4, name="head_rounds", kind=int),
        Option("whether ranks that share tokens or heads are neighbours", choices=RANK_PLACEMENTS, name="placement"),
        Option("send partial outputs and gradients in the 16 bits of the model", name="partials_in_16_bits", kind=bool),
    )
}

BETWEEN_LAYERS = re.compile(r",(?!\w+=)")  # in a list by layer; after another comma an option follows
_COUNT = re.compile(r"\*[1-9][0-9]*$")


@dataclass(frozen=True)
class Choice:
    """A strategy with its layout and options.

    Attributes:
        common: the given options of `COMMON`, by name; options: the strategy's own.
        source: the module or file that registers the strategy, if the spec names one.
        for_backward: the choice for the backward pass, if different; the options of `COMMON` are the same.
    """

    strategy: Strategy
    common: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    for_backward: "Choice | None" = None

    def __hash__(self) -> int:
        return hash(self.spec)

    @property
    def layout(self) -> str:
        return self.common.get("layout") or self.strategy.layouts[0]

    @property
    def partials_in_16_bits(self) -> bool:
        """Whether a pass sends its partials in the model's dtype, which must have 16 bits."""
        passes = [self, self.for_backward] if self.for_backward else [self]
        return any(choice.common.get("partials_in_16_bits") for choice in passes)

    @property
    def spec(self) -> str:
        """The text that gives this choice."""
        options = {**self.common, **self.options}
        if self.layout == self.strategy.layouts[0]:
            options.pop("layout", None)
        own = ":".join(part for part in (self.source, self.strategy.name, _written(options)) if part)
        return f"{own}+{self.for_backward.spec}" if self.for_backward else own

    def of_pass(self, backward: bool) -> "Choice":
        """The choice for one pass."""
        return self.for_backward if backward and self.for_backward else self

    def plan(
        self,
        n: int,
        *,
        causal: bool = True,
        visible_pairs: Pairs | None = None,
        backward: bool = False,
        heads: int | None = None,
        kv_heads: int | None = None,
    ) -> Plan:
        """`Strategy.plan` of this choice."""
        given: dict[str, Any] = {"causal": causal, "visible_pairs": visible_pairs, "heads": heads, "kv_heads": kv_heads}
        own = self.common | self.options | given
        forward = self.strategy.plan(n, backward=backward and not self.for_backward, **own)
        if self.for_backward is None:
            return forward
        back = self.for_backward.plan(n, backward=True, **given)
        places = [(plan.layout, plan.head_parallel_size, plan.placement, plan.head_rounds) for plan in (forward, back)]
        if places[0] != places[1]:
            named = "layout {}, head-parallel size {}, placement {}, head rounds {}"
            told = [named.format(*place) for place in places]
            why = f"the forward pass has {told[0]}, the backward pass {told[1]}"
            shared = [layout for layout in self.strategy.layouts if layout in self.for_backward.strategy.layouts]
            such = f", such as --cp-layout {shared[0]}" if shared and forward.layout != back.layout else ""
            raise UsageError(f"--cp-strategy {self.spec}: {why}; give both the same{such}")
        return back if backward else forward


def spec_text(spec: "str | Choice", **options: object) -> str:
    """`spec` and `options` in one text, unchecked."""
    text = spec.spec if isinstance(spec, Choice) else str(spec)
    given = _written({name: value for name, value in options.items() if value is not None})
    return f"{text}{',' if '=' in text else ':'}{given}" if given else text


def _written(options: dict[str, object]) -> str:
    return ",".join(f"{name}={show(value)}" for name, value in sorted(options.items()))


def parse_spec(spec: "str | Choice", n: int | None = None, /, **options: object) -> Choice:
    """The strategy and options of `spec`, with additional `options`; None is ignored.

    Args:
        spec: as above.
        n: the number of ranks, if known. Advice on a grid then fits it.
        options: options by name, as values or text.

    Raises:
        UsageError: the strategy, an option or a value is unknown.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(spec, Choice):
        passes = [spec, *([spec.for_backward] if spec.for_backward else ())]
        read = [_changed(one, one.strategy.with_current_names(given), n) for one in passes]
    else:
        try:
            read = [_read(part, given, n) for part in str(spec).split("+", 1)]  # options apply to both
        except UsageError:
            _refuse_list(str(spec))
            raise
    return replace(read[0], for_backward=read[1]) if len(read) > 1 else read[0]


def _read(spec: str, given: dict[str, Any], n: int | None) -> Choice:
    """The choice of one pass."""
    strategy, source, texts = _parse(spec)
    _check_dashes(spec, strategy, texts)
    own, again = (strategy.with_current_names(options) for options in (texts, given))
    if both := [name for name in own if name in again and _differs(strategy, name, own[name], again[name])]:
        raise UsageError(f"--cp-strategy {spec}: {min(both)} is given twice; leave one out")
    return _changed(Choice(strategy, source=source), own | again, n)


def _changed(choice: Choice, given: dict[str, Any], n: int | None) -> Choice:
    """The choice with other values of options, by their current names."""
    values = choice.common | choice.options | given
    common = {name: option.parse(values.pop(name)) for name, option in COMMON.items() if name in values}
    return replace(choice, common=common, options=choice.strategy.parse_options(values, n), for_backward=None)


def _differs(strategy: Strategy, name: str, value: Any, other: Any) -> bool:
    """Whether two given values of an option differ. Errors show whole specs, also with options that flags gave."""
    option = COMMON.get(name) or strategy.options.get(name)
    return option is None or option.parse(value) != option.parse(other)


def _check_dashes(spec: str, strategy: Strategy, texts: dict[str, Any]) -> None:
    """Reject an option that is written as in its flag, `head-parallel-size` for `head_parallel_size`."""
    for given in texts:
        name = given.replace("-", "_")
        if name != given and (name in COMMON or name in strategy.options):
            raise UsageError(f"--cp-strategy {spec}: no option {given}; give {name}")


def _parse(spec: str) -> tuple[Strategy, str, dict[str, Any]]:
    """Strategy, the module or file it comes from, and the options as text."""
    *parts, last = spec.split(":")
    parts, given = (parts, last) if "=" in last and parts else ([*parts, last], "")
    texts = {}
    for part in filter(None, given.split(",")):
        name, _, texts[name] = part.partition("=")
    if len(parts) > 2 or not all(parts):
        raise UsageError(f"--cp-strategy {spec}: give NAME, MODULE:NAME or FILE.py:NAME, then :OPTION=VALUE,...")
    source = parts[0] if len(parts) == 2 else ""
    if source in STRATEGIES:
        raise UsageError(f"--cp-strategy {spec}: {parts[1]} has no value; give {source}:OPTION=VALUE,...")
    if source:
        _load(source, spec)
    name = parts[-1]
    if name == AUTO:
        raise UsageError(
            f"--cp-strategy {spec}: give the result of resolve({AUTO!r}, workload, group) in "
            f"megatron.context_parallel.cluster.search.auto, or one of {', '.join(STRATEGIES)}"
        )
    if name not in STRATEGIES:
        raise UsageError(
            f"--cp-strategy {spec}: unknown; choose one of {', '.join(STRATEGIES)}, or the file or module of your own, "
            "such as my_file.py:my_strategy or my_module:my_strategy (or an entry point of your package)"
        )
    return STRATEGIES[name], source, texts


def _refuse_list(spec: str) -> None:
    """Raises UsageError for a list by layer (`by_layer.py`).

    After an option, what follows a comma is another layer's only if it names a strategy: `mesh:grid=2x2,overlap` has
    an option without a value.
    """
    parts = BETWEEN_LAYERS.split(spec)
    first, *others = (_COUNT.sub("", part) for part in parts)
    named = [other for other in others if ":" in other or other.split("+")[0] in STRATEGIES]
    if [first, *others] != parts or named or ("=" not in first and others):
        raise UsageError(
            f"--cp-strategy {spec}: all layers have one strategy here; give one, such as {first}"
        ) from None


def _load(source: str, spec: str) -> None:
    """Imports the module or file that registers a strategy, once."""
    try:
        if not source.endswith(".py"):
            importlib.import_module(source)
            return
        path = Path(source).resolve()
        name = f"cp_strategy_{path.stem}_{abs(hash(str(path)))}"
        if name not in sys.modules:
            module_spec = importlib.util.spec_from_file_location(name, path)
            assert module_spec and module_spec.loader  # both exist for names that end in .py
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[name] = module
            module_spec.loader.exec_module(module)
    except UsageError:
        raise
    except Exception as error:
        sys.modules.pop(name, None) if source.endswith(".py") else None
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"--cp-strategy {spec}: {source} cannot be loaded ({why})") from None
