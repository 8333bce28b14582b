"""The product of the few rows of a decode step with a weight, into a buffer."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.context_parallel.patches.torch_packed_linear import packed_linear

FEW = 6  # rows
VERY_FEW = 2

PackedWeights = Mapping[Tensor, Tensor]  # by the weight


@cache
def has_fast_vector_products() -> bool:
    """Whether MKL reads a weight at the speed of memory in a product with one or two rows: on Intel's processors."""
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "GenuineIntel" in cpus.read_text()


class Product:
    """x [rows, in] times the transpose of a weight [out, in].

    For very few float32 rows on other CPUs than Intel's, the weight is the first factor. That reads it up to three
    times as fast there as a product with x as the first factor, or with a vector: so a single row gets a row of zeros
    beside it. On Intel's it takes 1.8 times as long. For more rows a packed weight is faster, if there is one.

    Args:
        x, out: the buffers [rows, in] and [rows, out] of a step.
        packed: packed weights, if the weights do not change.
    """

    def __init__(self, x: Tensor, out: Tensor, packed: PackedWeights | None = None) -> None:
        self.x, self.out = x, out
        self.packed = packed if packed and len(x) > VERY_FEW else {}
        fewest = VERY_FEW + 1 if has_fast_vector_products() else 1
        self.few = fewest <= len(x) <= FEW and x.device.type == "cpu" and x.dtype is torch.float32
        if self.few:
            self.padded = x.new_zeros(2, x.shape[1]) if len(x) == 1 else x
            self.columns = out.new_zeros(out.shape[1], len(self.padded))
            self.result = self.columns.t()[: len(x)]

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Writes the product to `out`."""
        if weight in self.packed:
            self.out.copy_(packed_linear(self.x, self.packed[weight], bias))
            return
        if self.few:
            if self.padded is not self.x:
                self.padded[:1].copy_(self.x)
            torch.mm(weight, self.padded.t(), out=self.columns)
            self.out.copy_(self.result)
        else:
            torch.mm(self.x, weight.t(), out=self.out)
        if bias is not None:
            self.out.add_(bias)
