"""Attention of sequences whose rows are distributed arbitrarily over ranks, and its definition in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel import AllRanks, ContextParallel
from megatron.context_parallel.attention.api import attention_of_rows
from megatron.context_parallel.inference.pass_q import RING_PASS_Q
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.tokens.documents import Sequences
from megatron.context_parallel.tokens.layout import ListedChunks
from megatron.context_parallel.tokens.mask import Mask
from tests.support.dense import dense_attention, visible

VARIANTS = {
    "pass-kv": lambda n: "ring",
    "pass-q": lambda n: f"attention2d:grid=1x{n}",
    "pass-q-all-to-all": lambda n: RING_PASS_Q,
    "decode": lambda n: f"attention2d:grid=1x{n},overlap=false",
}


@dataclass
class Batch:
    """New and cached tokens of some sequences, and the rank that has each: [tokens] of all sequences end to end."""

    lengths: list[int]
    new: list[int]
    rank_of: Tensor
    n: int
    window: int = -1

    @classmethod
    def draw(cls, n: int, tokens: list[tuple[int, int]], seed: int, window: int = -1) -> "Batch":
        """`tokens` are (new, cached) of each sequence."""
        lengths = [new + cached for new, cached in tokens]
        generator = torch.Generator().manual_seed(seed)
        rank_of = torch.randint(n, (sum(lengths),), generator=generator)
        return cls(lengths, [new for new, _ in tokens], rank_of, n, window)

    @property
    def is_new(self) -> Tensor:
        """Which tokens are queries."""
        return torch.cat([torch.arange(x) >= x - new for x, new in zip(self.lengths, self.new, strict=True)])

    def chunks(self, of: Tensor | bool = True) -> ListedChunks:
        """Of the marked tokens, those of each rank."""
        rows = [torch.nonzero((self.rank_of == r) & of).flatten() for r in range(self.n)]
        document = torch.repeat_interleave(torch.tensor(self.lengths))
        counts = (torch.bincount(document[own], minlength=len(self.lengths)).tolist() for own in rows)
        return ListedChunks(tuple(map(tuple, counts)), rows.__getitem__)

    def blocks(self, kernel: Kernel | None = None) -> Blocks:
        mask = Mask(True, (self.window, -1), Sequences(self.lengths))
        return Blocks(mask, self.chunks(self.is_new), self.chunks(), kernel or AtenFlash())

    def tensors(self, heads: int, kv_heads: int, d: int = 8) -> list[Tensor]:
        """q, k, v [tokens, 1, heads, d] in float64; of q only the new rows count."""
        generator = torch.Generator().manual_seed(len(self.lengths))
        shapes = [(sum(self.lengths), 1, h, d) for h in (heads, kv_heads, kv_heads)]
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def expected(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The definition, [tokens, 1, heads, d] in float64."""
        at, documents = torch.arange(len(q)), torch.repeat_interleave(torch.tensor(self.lengths))
        out, _ = dense_attention(q, k, v, visible(at, at, True, (self.window, -1), documents))
        return out

    def inputs(self, rank: int, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """What a rank gives, in float32."""
        at_q, at_kv = blocks.q.positions(rank), blocks.kv.positions(rank)
        return q[at_q].float(), k[at_kv].float(), v[at_kv].float()


def error(batch: Batch, cp: AllRanks | ContextParallel, heads: int = 4, kv_heads: int = 2) -> float:
    """The largest difference from the definition on the ranks of this process."""
    q, k, v = batch.tensors(heads, kv_heads)
    expected, blocks = batch.expected(q, k, v), batch.blocks()
    outs = attention_of_rows([batch.inputs(r, blocks, q, k, v) for r in cp.local_ranks], cp, blocks)
    differences = [out - expected[blocks.q.positions(r)] for r, out in zip(cp.local_ranks, outs, strict=True)]
    return max((x.abs().max().item() for x in differences if len(x)), default=0.0)
