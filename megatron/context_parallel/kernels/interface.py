"""The interface of a kernel for block attention. `choose.py` selects one for a tensor."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .masks import KeyRanges, Piece, PieceMask


@dataclass(frozen=True)
class Scores:
    """How scores are computed from queries and keys: s = scale * q.k, and with a softcap c > 0, c * tanh(s / c).

    Raises:
        UsageError: the scale is not positive and finite (kernels also scale the -inf of masks), or the softcap is
            negative or not finite.
    """

    scale: float
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise UsageError(
                f"softmax scale {self.scale}: must be positive and finite, such as 0.125 (1 / sqrt(head_dim))"
            )
        if not 0 <= self.softcap < math.inf:
            raise UsageError(f"softcap {self.softcap}: must be positive, such as 50.0, or 0 for none")


class BlockGrad(NamedTuple):
    """Inputs of the backward pass of a block: dout [s, B, G, dv], the rest as in `Kernel`.

    `lse` and `delta` = rowsum(dout * out) are those of the whole sequence, so the gradients of the blocks add up.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    mask: PieceMask


class Kernel(Protocol):
    """Attention of one block.

    Shapes: queries [s, B, G, d], keys [t, B, d], values [t, B, dv], log-sum-exp and delta [s, B, G] in float32
    or wider; B is batch × key/value heads, G the query heads that share one. Strided views are accepted.
    """

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        """The pieces of a masked block of `keys` key rows for this kernel. Not called for a fully masked block."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns the output [s, B, G, dv] in q's dtype or wider and its log-sum-exp; 0 and -inf if no key is seen."""
        ...

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq [s, B, G, d], dk [t, B, d] and dv [t, B, dv] of this block, in q's dtype or wider."""
        ...
