"""Block attention: what a kernel is to its users; `choose.py` says which serves a tensor."""

import math
from typing import Protocol

from torch import Tensor

from ..errors import UsageError
from .masks import Mask, Piece, Runs


def check_scale(scale: float) -> None:
    """Refuses a softmax scale with which kernels mask wrongly: they scale scores of -inf too.

    Raises:
        UsageError: a scale that is not positive and finite.
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise UsageError(f"softmax scale {scale}: must be positive and finite, such as 0.125 (1 / sqrt(head_dim))")


class Kernel(Protocol):
    """Attention of one block.

    Shapes: queries [s, B, G, d], keys and values [t, B, d], log-sum-exp and delta [s, B, G] in float32 (float64 for
    float64); B is batch × key/value heads, G the query heads that share one. Strided views are welcome.
    """

    def pieces(self, block: Runs, keys: int) -> list[Piece]:
        """How this kernel wants a masked block of `keys` key rows cut; not called for one that is all masked."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the output [s, B, G, d] in q's dtype or wider, and its log-sum-exp; 0 and -inf if nothing is seen."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: Mask,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq [s, B, G, d] and dk, dv [t, B, d] of this block, in q's dtype or wider.

        `lse` and `delta` = rowsum(dout * out) are those of the whole sequence, so the gradients of the blocks add up.
        """
        ...
