"""The common part of the attention libraries for CUDA: full and causal blocks.

A library gets the folded tensors as one sample of B x G query heads and B key/value heads. They are views, with rows
before heads as they are stored. The library handles grouped-query attention: query head h reads key/value head h // G.

All return the natural log-sum-exp of the scaled scores in float32. All backward passes take the output of the whole
sequence, but read it only in rowsum(dout * out) = delta, so they get a substitute with the same row sums. The code that
reads it: flash-attn 2 and ATen, `compute_dot_do_o` in flash_bwd_preprocess_kernel.h; flash-attn 3, hopper/
flash_bwd_preprocess_kernel.h; flash-attn 4, `_bwd_preprocess` in cute/interface.py; cuDNN, the chain
"dO * o => softmax_sum" of sdpa_backward in cudnn-frontend, the graph that cuDNN gets.
"""

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.torch_version import TorchVersion

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.delta import output_with
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, KeyRanges, Piece, PieceMask, cut

Capability = tuple[int, int]  # of a GPU; (9, 0) is sm_90
# Makes the error for a block that a library does not compute, of the reason and of whether its mask is irregular.
RefuseBlock = Callable[[str, bool], UsageError]


class Library(ABC):
    """`kernels.Kernel` of full and causal blocks, float16 and bfloat16, one head_dim, a multiple of 8; no softcap.

    Args:
        deterministic: gradients are the same bit for bit each time.
        refuse: makes the error for a block that it does not compute.

    Attributes:
        name: the value of `--cp-attention-backend`.
        title: the name of the library in messages.
        module: the module that is called.
        distribution, oldest: the package whose version is checked, and its first one with the signatures called here.
        blocks: the blocks it computes, in words; `takes` decides.
        strict_only: it is deterministic only if PyTorch's deterministic mode raises errors (`warn_only=False`).
    """

    name: str
    title: str
    module: str = "torch"
    distribution: str = ""
    oldest: str = ""
    blocks: str = "full and causal blocks"
    strict_only: bool = False

    def __init__(self, *, deterministic: bool = False, refuse: RefuseBlock | None = None) -> None:
        self.calls = importlib.import_module(self.module)
        self.deterministic = deterministic
        self.refuse: RefuseBlock = refuse or (lambda why, irregular: UsageError(f"{self.name}: {why}"))

    @classmethod
    def missing(cls, head_dim: int) -> str | None:
        """Why the library cannot be used on this host; None if it can."""
        try:
            version = importlib.metadata.version(cls.distribution) if cls.distribution else ""
        except importlib.metadata.PackageNotFoundError:
            return f"{cls.distribution} is not installed"
        if version and TorchVersion(version) < cls.oldest:
            return f"{cls.distribution} {version} is older than {cls.oldest}"
        try:
            importlib.import_module(cls.module)
        except ImportError as error:
            return f"{cls.title} cannot be imported ({error})"
        return None

    @classmethod
    def lacks(cls, head_dim: int, value_dim: int, softcap: float) -> str | None:
        """Why no GPU computes this with the library; None if some do."""
        if value_dim != head_dim:
            return f"{cls.title} is called with one head_dim, not {head_dim} for keys and {value_dim} for values"
        return f"{cls.title} is called without a softcap, not with {softcap}" if softcap else None

    @classmethod
    @abstractmethod
    def head_dims(cls, capability: Capability, *, deterministic: bool) -> Sequence[int]:
        """The head_dims, forward and backward, on a GPU of that compute capability; none if it does not run there."""

    @classmethod
    def takes(cls, piece: Piece, rows: int, keys: int) -> bool:
        """Whether it computes a piece of a block of `rows` query rows and `keys` key rows."""
        return not isinstance(piece.mask, KeyRanges)

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        """As `Kernel.pieces`.

        Raises:
            UsageError: the block cannot be split into pieces that the library supports.
        """
        return self.cut_or_refuse(block, keys, self.refuse)

    @classmethod
    def cut_or_refuse(cls, block: KeyRanges, keys: int, refuse: RefuseBlock) -> list[Piece]:
        """`pieces` without the library itself."""
        found = cut(block, short=0)
        rows = block.first.shape[1]
        refused = [piece for piece in found if not cls.takes(piece, rows, keys)]
        if refused:
            piece = next((one for one in refused if isinstance(one.mask, KeyRanges)), refused[0])
            irregular = isinstance(piece.mask, KeyRanges)
            mask = "irregular" if irregular else piece.mask
            sizes = f"{length(piece.q)} rows by {length(piece.kv)} keys, {mask}"
            raise refuse(f"{cls.title} computes {cls.blocks}, not {sizes}", irregular)
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        self._check(q, v, scores)
        s, b, group, _ = q.shape
        out, lse = self._forward(_one(q.flatten(1, 2)), _one(k), _one(v), mask == CAUSAL, scores.scale)
        return out.squeeze(0).unflatten(1, (b, group)), lse.reshape(b, group, s).permute(2, 0, 1)

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, lse, delta, mask = grad
        self._check(q, v, scores)
        b, group = q.shape[1:3]
        by_row = [_one(x.flatten(1, 2)) for x in (dout, q, output_with(delta, dout))]
        stats = _one(lse.permute(1, 2, 0).flatten(0, 1)).contiguous()
        dout, q, out = by_row
        dq, dk, dv = self._backward(dout, q, _one(k), _one(v), out, stats, mask == CAUSAL, scores.scale)
        return dq.squeeze(0).unflatten(1, (b, group)), dk.squeeze(0), dv.squeeze(0)

    def _check(self, q: Tensor, v: Tensor, scores: Scores) -> None:
        if why := self.lacks(q.shape[-1], v.shape[-1], scores.softcap):
            what = f"{q.shape[-1]}, value_dim={v.shape[-1]}, softcap={scores.softcap}"
            raise UsageError(f"{self.name}: {why}; choose the kernel by kernel_for(q.device, q.dtype, {what})")

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, s, heads, d], k and v [1, t, kv_heads, d] to out like q, and the log-sum-exp, heads x s numbers."""

    @abstractmethod
    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors as in `_forward`, lse [1, heads, s] contiguous, to dq, dk, dv."""


def _one(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def length(rows: slice) -> int:
    return len(range(rows.start, rows.stop, rows.step or 1))
