"""Ranks as the points of a grid with named dimensions: rows and columns, heads and rings, tp-cp-dp-pp."""

import math
from dataclasses import dataclass

from megatron.context_parallel.errors import UsageError


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks. The first dimension varies fastest, as in Megatron's `order="tp-cp-ep-dp-pp"`.

    Attributes:
        names: the names of the dimensions, innermost first.
        sizes: the sizes of the dimensions.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or min(self.sizes) < 1:
            raise UsageError(f"grid of ranks {self.names} of sizes {self.sizes}: need one positive size per dimension")

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` along each dimension."""
        coordinates = {}
        for name, size in zip(self.names, self.sizes, strict=True):
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """The rank at given coordinates; omitted ones are 0."""
        rank, stride = 0, 1
        for name, size in zip(self.names, self.sizes, strict=True):
            rank += coordinates.get(name, 0) * stride
            stride *= size
        return rank

    def along(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only in the dimensions `names`, itself included, ascending."""
        found = [0]
        stride = 1
        for name, size in zip(self.names, self.sizes, strict=True):
            along = range(size) if name in names else (rank // stride % size,)
            found = [inner + coordinate * stride for coordinate in along for inner in found]
            stride *= size
        return tuple(found)
