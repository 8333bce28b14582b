"""The position kernel: attention of a block under any mask in one launch, in Triton."""

from .kernel import FEW_ROWS, PARTS, PositionKernel, architecture, refusal, triton_refusal

__all__ = ["FEW_ROWS", "PARTS", "PositionKernel", "architecture", "refusal", "triton_refusal"]
