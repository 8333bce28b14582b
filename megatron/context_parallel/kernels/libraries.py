"""Full and causal blocks by the attention libraries for CUDA.

A library sees the folded tensors as one sample of B x G query heads and B key/value heads: views, rows before heads as
they are stored, and grouped-query attention is its own (query head h reads key/value head h // G in all of them).

All return the natural log-sum-exp of the scaled scores in float32. All backward passes ask for the output of the whole
sequence but read it only in rowsum(dout * out) = delta, so they get a stand-in with the same row sums. Where that is to
be seen: flash-attn 2 and ATen, `compute_dot_do_o` in flash_bwd_preprocess_kernel.h; flash-attn 3, hopper/
flash_bwd_preprocess_kernel.h; flash-attn 4, `_bwd_preprocess` in cute/interface.py; cuDNN (through ATen and through
Transformer Engine), the chain "dO * o => softmax_sum" of sdpa_backward in cudnn-frontend, the graph cuDNN is given.
"""

import importlib
import importlib.metadata
import re
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..errors import UsageError
from . import BlockGrad, Scores
from .delta import output_with
from .masks import CAUSAL, Mask, Piece, Runs, cut

Capability = tuple[int, int]  # of a GPU; (9, 0) is sm_90
_aten = torch.ops.aten


class Library(ABC):
    """`kernels.Kernel` of full and causal blocks, float16 and bfloat16, one head_dim, a multiple of 8; no softcap.

    Attributes:
        name: of `--cp-attention-backend`.
        title: what computes.
        module: what is called.
        distribution, oldest: the package whose version matters and its first one with the signatures called here.
    """

    name: str
    title: str
    module: str = "torch"
    distribution: str = ""
    oldest: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.calls = importlib.import_module(self.module)

    @classmethod
    def missing(cls) -> str | None:
        """Why the library cannot be used on this host, whatever the GPU; None if it can."""
        try:
            importlib.import_module(cls.module)
            version = importlib.metadata.version(cls.distribution) if cls.distribution else ""
        except ImportError as error:
            return f"{cls.title} cannot be imported ({error})"
        if _numbers(version) < cls.oldest:
            return f"{cls.distribution} {version} is older than {'.'.join(map(str, cls.oldest))}"
        return None

    @classmethod
    def lacks(cls, head_dim: int, value_dim: int, softcap: float) -> str | None:
        """Why no GPU computes this with the library; None if some do."""
        if value_dim != head_dim:
            return f"{cls.title} is called with one head_dim, not {head_dim} for keys and {value_dim} for values"
        return f"{cls.title} is called without a softcap, not with {softcap}" if softcap else None

    @classmethod
    @abstractmethod
    def largest_head(cls, capability: Capability) -> int:
        """Largest head_dim, forward and backward, on a GPU of that compute capability; 0: does not run there."""

    def pieces(self, block: Runs, keys: int) -> list[Piece]:
        """As `Kernel.pieces`.

        Raises:
            UsageError: a mask that does not come apart into full and causal blocks.
        """
        found = cut(block, short=0)
        if any(isinstance(piece.mask, Runs) for piece in found):
            raise UsageError(
                f"--cp-attention-backend {self.name}: {self.title} has no mask for blocks that are neither full nor "
                "causal; give --cp-attention-backend triton"
            )
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> tuple[Tensor, Tensor]:
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
            raise UsageError(f"--cp-attention-backend {self.name}: {why}; give --cp-attention-backend triton")

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, s, heads, d], k and v [1, t, kv_heads, d] to out like q and the log-sum-exp of heads x s numbers."""

    @abstractmethod
    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors as in `_forward`, lse [1, heads, s] contiguous, to dq, dk, dv."""


def _one(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


class AtenFlashCuda(Library):
    """ATen's copy of flash-attn 2, present in every CUDA build of PyTorch."""

    name, title = "aten", "PyTorch's flash attention"

    @classmethod
    def missing(cls) -> str | None:
        return None if torch.backends.cuda.is_flash_attention_available() else "this PyTorch has no flash attention"

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        # Backward of more than 192 needs the shared memory of data-center GPUs (sdp_utils.cpp).
        small = (8, 0) < capability < (9, 0) or capability[0] == 12
        return 0 if capability < (8, 0) else 192 if small else 256

    def _forward(self, q, k, v, causal, scale):
        sizes = q.shape[1], k.shape[1]
        return _aten._flash_attention_forward(q, k, v, None, None, *sizes, 0.0, causal, False, scale=scale)[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout's random numbers
        sizes = q.shape[1], k.shape[1]
        return _aten._flash_attention_backward(
            *(dout, q, k, v, out, lse, None, None, *sizes, 0.0, causal, unused, unused), scale=scale
        )


class Cudnn(Library):
    """cuDNN's attention through ATen, which takes heads before rows, with any strides."""

    name, title = "cudnn", "cuDNN attention through PyTorch"

    def __init__(self) -> None:
        super().__init__()
        self.stats_dims = 3  # versions of PyTorch differ in the log-sum-exp: [1, heads, s] or [1, heads, s, 1]

    @classmethod
    def missing(cls) -> str | None:
        version = torch.backends.cudnn.version() or 0
        return (
            None if version >= 90000 else f"cuDNN is {version}, older than 9.0" if version else "PyTorch has no cuDNN"
        )

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        # check_cudnn_tensor_shapes in sdp_utils.cpp; cuDNN's own table allows no more in the backward pass.
        if capability < (8, 0):
            return 0
        return 256 if capability == (9, 0) and (torch.backends.cudnn.version() or 0) >= 91000 else 128

    def _forward(self, q, k, v, causal, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, stats = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        self.stats_dims = stats.dim()
        return out.transpose(1, 2), stats

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        stats = lse.unsqueeze(-1) if self.stats_dims == 4 else lse
        sizes = q.shape[1], k.shape[1]
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *(*heads_first, stats, unused, unused, None, None, None, *sizes, 0.0, causal), scale=scale
        )
        return tuple(grad.transpose(1, 2) for grad in grads)


class FlashAttention2(Library):
    name, title, module = "flash2", "flash-attn 2", "flash_attn.flash_attn_interface"
    distribution, oldest = "flash-attn", (2, 7)

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        return AtenFlashCuda.largest_head(capability)

    def _forward(self, q, k, v, causal, scale):
        return self.calls._flash_attn_forward(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.calls._flash_attn_backward(
            *(dout, q, k, v, out, lse, *grads),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=_deterministic(),
        )
        return grads


class FlashAttention3(Library):
    """flash-attn 3 by its operators: the signatures of its Python functions differ between builds, these do not."""

    name, title, module = "flash3", "flash-attn 3", "flash_attn_3._C"

    def __init__(self) -> None:
        super().__init__()  # registers the operators
        self.calls = torch.ops.flash_attn_3

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        return 256 if capability == (9, 0) else 0

    def _forward(self, q, k, v, causal, scale):
        return self.calls.fwd(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.calls.bwd(
            *(dout, q, k, v, out, lse, *grads),
            softmax_scale=scale,
            is_causal=causal,
            deterministic=_deterministic(),
        )
        return grads


class FlashAttention4(Library):
    """flash-attn 4 (CuTe DSL), compiled at first use; a beta, so only where its authors and PyTorch offer it."""

    name, title, module = "flash4", "flash-attn 4", "flash_attn.cute.interface"

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        return {9: 256, 10: 128}.get(capability[0], 0)  # _validate_head_dims

    def _forward(self, q, k, v, causal, scale):
        return self.calls._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        return self.calls._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, causal=causal, deterministic=_deterministic()
        )[:3]


class TransformerEngine(Library):
    """Transformer Engine's fused attention: cuDNN's, in a layout given by name, so strided tensors are copied."""

    name, title = "te", "Transformer Engine's fused attention"
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    distribution, oldest = "transformer-engine", (2, 20)
    _LAYOUT = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd"}

    @classmethod
    def largest_head(cls, capability: Capability) -> int:
        return Cudnn.largest_head(capability)

    def _how(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[list, dict]:
        """The first arguments, and those by name, that forward and backward share."""
        rows = [q.shape[1], k.shape[1]]
        ends = [torch.arange(0, count + 1, count, dtype=torch.int32, device=q.device) for count in rows]
        mask = {"attn_mask_type": "causal" if causal else "no_mask", "window_size": (-1, 0 if causal else -1)}
        engine = {"fused_attention_backend": self.calls.FusedAttnBackend["F16_arbitrary_seqlen"]}
        how = {"attn_scale": scale, "dropout": 0.0, "attn_bias_type": "no_bias", "fake_dtype": q.dtype}
        return rows + ends, self._LAYOUT | mask | engine | how

    def _forward(self, q, k, v, causal, scale):
        q, k, v = (x.contiguous() for x in (q, k, v))
        first, how = self._how(q, k, causal, scale)
        out, (stats, *_) = self.calls.fused_attn_fwd(True, *first, q, k, v, **how)[:2]
        return out, stats

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        dout, q, k, v, out = (x.contiguous() for x in (dout, q, k, v, out))
        first, how = self._how(q, k, causal, scale)
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
        how |= {"do_format": "bshd", "dqkv_layout": "bshd_bshd_bshd", "deterministic": _deterministic()}
        how["aux_ctx_tensors"] = [lse.unsqueeze(-1), no_dropout]
        return tuple(self.calls.fused_attn_bwd(*first, q, k, v, out, dout, **how)[:3])


LIBRARIES: dict[str, type[Library]] = {
    library.name: library
    for library in (AtenFlashCuda, Cudnn, FlashAttention2, FlashAttention3, FlashAttention4, TransformerEngine)
}
