"""Whether the arguments of `register` are what they must be. Its function and options are checked in `options.py`."""

import re

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.ir import SWAPS
from megatron.context_parallel.tokens.layout import LAYOUTS

AUTO = "auto"  # instead of a strategy: the planner chooses
# Names of the trainer that begin with cp_ and are no options of strategies.
FLAGS = ("attention_backend", "cluster", "comm_type", "layers", "measured", "place_documents", "strategy")


def check_declaration(name: object, layouts: object, channels: object, head_parallel: object, period: object) -> None:
    """Raises UsageError unless the arguments are as `register` says. Others are named when they are used."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name) or name == AUTO:
        raise UsageError(f"strategy {name!r}: need a name of letters, digits, _ and -, such as my_ring")
    _check_layouts(name, layouts)
    if not isinstance(channels, tuple | list) or not all(isinstance(x, str) and x for x in channels):
        raise UsageError(f'strategy {name}: channels {channels!r}; give a tuple of names, such as ("ring",)')
    if SWAPS in channels:
        raise UsageError(f"strategy {name}: channel {SWAPS}: head swaps use it; choose another name")
    if head_parallel not in ("optional", "required", "all"):
        raise UsageError(f"strategy {name}: head_parallel {head_parallel!r}; choose optional, required or all")
    if not (period is None or callable(period) or (type(period) is int and period > 0)):
        raise UsageError(f"strategy {name}: period {period!r}; give a number of ranks, such as 1, or a function")


def _check_layouts(name: str, layouts: object) -> None:
    if isinstance(layouts, tuple | list):
        unknown = ", ".join([str(layout) for layout in layouts if layout not in LAYOUTS])
        wrong = unknown or ("" if layouts else "missing")
    else:
        wrong = f"{layouts!r}, not a tuple"
    if wrong:
        raise UsageError(f"strategy {name}: layouts {wrong}; choose among {', '.join(LAYOUTS)}")
