"""The position kernel: attention of a block under any mask in one launch, by Triton code of our own."""

from .kernel import PARTS, PositionKernel, architecture

__all__ = ["PARTS", "PositionKernel", "architecture"]
