"""The strategies by name. Each is a function that yields the steps of one rank.

An installed package adds its strategies with an entry point of the group `megatron.context_parallel.strategies`. The
entry point names a module that registers them.
"""

from importlib.metadata import entry_points

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import Grid, Option

from .allgather import allgather
from .attention2d import attention2d
from .by_layer import check_same_tokens, choose_by_layer, distinct, specs_given
from .direct import direct
from .double_ring import double_ring
from .lightseq import lightseq
from .mesh import mesh
from .messages import Ring, relay
from .registry import STRATEGIES, Pass, Strategy, head_parallel_sizes, register, rounds_of_heads
from .ring import ring
from .spec import AUTO, COMMON, Choice, parse_spec, spec_text
from .ulysses import ulysses, usp

__all__ = [
    "AUTO",
    "COMMON",
    "STRATEGIES",
    "Choice",
    "Grid",
    "Option",
    "Pass",
    "Ring",
    "Strategy",
    "allgather",
    "attention2d",
    "check_same_tokens",
    "choose_by_layer",
    "direct",
    "distinct",
    "double_ring",
    "head_parallel_sizes",
    "lightseq",
    "mesh",
    "parse_spec",
    "register",
    "relay",
    "ring",
    "rounds_of_heads",
    "spec_text",
    "specs_given",
    "ulysses",
    "usp",
]


def _load_installed() -> None:
    """Imports the strategies of installed packages. Raises UsageError if one cannot be imported."""
    for entry in entry_points(group="megatron.context_parallel.strategies"):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            raise UsageError(
                f"strategy {entry.name} of the installed package {package}: {entry.value} cannot be imported "
                f"({type(error).__name__}: {error}); repair or uninstall the package"
            ) from error


_load_installed()
