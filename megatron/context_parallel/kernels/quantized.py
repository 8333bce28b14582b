"""Keys and values in 8 bits, with a scale for each row and head, and a kernel that reads them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .interface import BlockGrad, Kernel, Scores
from .masks import KeyRanges, Piece, PieceMask
from .names import SCALE_BYTES


class Format(NamedTuple):
    """A dtype of 8 bits, and its largest number."""

    dtype: torch.dtype
    largest: float


FORMATS = {"int8": Format(torch.int8, 127.0), "fp8": Format(torch.float8_e4m3fn, 448.0)}


def pack(x: Tensor, form: str) -> Tensor:
    """Rows [..., d] as uint8 [..., d + 4]: their numbers in 8 bits, then their scale, largest number / `largest`.

    Args:
        x: d is a multiple of 4, so that scales are aligned.
        form: one of `FORMATS`.
    """
    dtype, largest = FORMATS[form]
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).div_(largest)
    numbers = wide / torch.where(scale == 0, 1.0, scale)
    numbers = (numbers.round_() if dtype is torch.int8 else numbers).to(dtype)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], -1)


def unpack(x: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The rows [..., d] in `dtype` that `pack` stored, rounded to the nearest numbers in 8 bits."""
    numbers, scale = x[..., :-SCALE_BYTES].view(FORMATS[form].dtype), x[..., -SCALE_BYTES:].view(torch.float32)
    return (numbers.float() * scale).to(dtype)


@dataclass(frozen=True)
class QuantizedKernel:
    """`kernels.Kernel` for keys and values that `pack` made, without gradients.

    Attributes:
        kernel: computes on unpacked rows.
        form: one of `FORMATS`.
        key_dim, value_dim: of the unpacked rows.

    Raises:
        UsageError: a head_dim is no multiple of 4.
    """

    kernel: Kernel
    form: str
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for size in (self.key_dim, self.value_dim):
            if size % SCALE_BYTES:
                raise UsageError(f"--kv-cache-dtype {self.form}: head_dim {size} is no multiple of 4; give auto")

    @property
    def name(self) -> str:
        return f"{getattr(self.kernel, 'name', '')}+{self.form}"

    def unpacked_like(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors with the shapes and dtype of the unpacked rows, without their numbers."""
        one = q.new_empty(1)
        return one.expand(*k.shape[:-1], self.key_dim), one.expand(*v.shape[:-1], self.value_dim)

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        return self.kernel.pieces(block, keys)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        keys, values = (unpack(x, self.form, q.dtype) for x in (k, v))
        return self.kernel.forward(q, keys, values, mask, scores)

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("keys in 8 bits have no gradients")
