"""The strategies by name. Each is a pure function that returns plans."""

from .allgather import allgather
from .attention2d import attention2d
from .lightseq import lightseq
from .mesh import mesh
from .registry import STRATEGIES, Strategy, find_strategy, register
from .ring import ring

__all__ = [
    "STRATEGIES",
    "Strategy",
    "allgather",
    "attention2d",
    "find_strategy",
    "lightseq",
    "mesh",
    "register",
    "ring",
]
