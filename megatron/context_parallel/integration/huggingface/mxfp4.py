"""MXFP4 (OCP Microscaling Formats 1.0): groups of 32 numbers of 4 bits that share a power of two."""

import torch
from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers, exactly, as bfloat16 [rows, 32 groups].

    Args:
        blocks: uint8 [rows, groups, 16], two numbers a byte, the first in its low half.
        scales: uint8 [rows, groups], the exponents of two, plus 127.
    """
    values = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2)
    powers = torch.exp2(scales.float() - 127).unsqueeze(-1)
    return (values[codes.int()] * powers).flatten(1).bfloat16()
