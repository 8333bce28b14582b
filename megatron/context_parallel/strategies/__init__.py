"""The strategies by name. Each is a pure function that returns plans."""

from .allgather import allgather
from .double_ring import double_ring
from .registry import STRATEGIES, Strategy, find_strategy, register
from .ring import ring
from .ulysses import ulysses, usp

__all__ = [
    "STRATEGIES",
    "Strategy",
    "allgather",
    "double_ring",
    "find_strategy",
    "register",
    "ring",
    "ulysses",
    "usp",
]
