"""The strategies by name. Each is a pure function that returns plans.

Installed packages add theirs by the entry point group `megatron.context_parallel.strategies`, which names a module
that registers them.
"""

from importlib.metadata import entry_points

from .allgather import allgather
from .attention2d import attention2d
from .double_ring import double_ring
from .lightseq import lightseq
from .mesh import mesh
from .registry import STRATEGIES, Strategy, find_strategy, register
from .ring import ring
from .ulysses import ulysses, usp

__all__ = [
    "STRATEGIES",
    "Strategy",
    "allgather",
    "attention2d",
    "double_ring",
    "find_strategy",
    "lightseq",
    "mesh",
    "register",
    "ring",
    "ulysses",
    "usp",
]

for _entry in entry_points(group="megatron.context_parallel.strategies"):
    _entry.load()
