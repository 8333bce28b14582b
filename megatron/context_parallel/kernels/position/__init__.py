"""The position kernel: attention of a block under any mask in one launch, in Triton."""

from .kernel import PARTS, PositionKernel, architecture

__all__ = ["PARTS", "PositionKernel", "architecture"]
