"""The heads of a layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """The heads of a layer on this rank, and their sizes."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int
