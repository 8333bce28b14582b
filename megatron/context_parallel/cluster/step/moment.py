"""The memory of one rank at a moment of a training step, by kind."""

from typing import NamedTuple

GATHERED = "gathered weights"
LOGITS, BUFFERS = "logits and loss", "attention buffers"
OUTPUT, MLP, ATTENTION, END = "output layer", "MLP backward", "attention backward", "end of a layer"
GATHER = "gather of weights"
REDUCTION, OPTIMIZER = "gradient reduction", "optimizer step"
GRADIENTS = "whole gradients"
BUILDING = "building of the model"


class MemoryItem(NamedTuple):
    """Memory of one kind: its name, its bytes on a rank, and the formula."""

    what: str
    bytes: int
    formula: str


class Moment(NamedTuple):
    """A moment of a step at which memory may be the largest, and all that a rank has then."""

    name: str
    items: list[MemoryItem]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)
