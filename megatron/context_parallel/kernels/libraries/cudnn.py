"""cuDNN, through PyTorch."""

from collections.abc import Sequence

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from megatron.context_parallel.kernels.masks import Piece

from .base import Capability, Library, RefuseBlock, length

_aten = torch.ops.aten
TILE = 128  # rows of a key tile


class Cudnn(Library):
    """cuDNN's attention through ATen, with heads before rows, and any strides.

    It computes only some pieces of a block:

    - Whole and half chunks. ATen keeps one graph for each shape, and building one takes many times as long as running
      it (MHA.cpp). Documents give pieces of new lengths in every batch.
    - Multiples of 128 rows and keys. Other lengths trigger bugs in the backward pass. Up to 9.15.0 it reads out of
      bounds (release notes of cudnn-frontend 1.16). For keys of 64 modulo 128 and a log-sum-exp below -88, dQ is
      NaN on sm_90 in every version up to at least 9.20 (cudnn-frontend pull request 628, pytorch issue 196678).
    """

    name, title = "cudnn", "cuDNN attention through PyTorch"
    blocks = f"full and causal blocks of whole and half chunks in multiples of {TILE} rows"

    def __init__(self, *, deterministic: bool = False, refuse: RefuseBlock | None = None) -> None:
        super().__init__(deterministic=deterministic, refuse=refuse)
        self.stats_dims = 3  # the log-sum-exp is [1, heads, s] or [1, heads, s, 1], depending on the version of PyTorch

    @classmethod
    def missing(cls, head_dim: int) -> str | None:
        version = torch.backends.cudnn.version()
        if not version:
            return "this PyTorch has no cuDNN"
        if version <= 91500:  # 9.10.0 and 9.10.1 also have wrong gradients (sdpa_support_surface.h of cudnn-frontend)
            return f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100} has bugs; install 9.15.1 or newer"
        if head_dim > 128 and not _pytorch_allows(head_dim):
            return f"head_dim {head_dim} needs cuDNN newer than 9.22 and a PyTorch that uses it (see docs/kernels.md)"
        return None

    @classmethod
    def head_dims(cls, capability: Capability, *, deterministic: bool) -> Sequence[int]:
        # check_cudnn_deterministic and check_cudnn_tensor_shapes in sdp_utils.cpp.
        if deterministic or capability < (8, 0):
            return ()
        return (*range(8, 129, 8), *([256] if capability == (9, 0) or capability[0] == 10 else []))

    @classmethod
    def takes(cls, piece: Piece, rows: int, keys: int) -> bool:
        half = max(rows // 2, 1)
        for size, whole in ((length(piece.q), rows), (length(piece.kv), keys)):
            if size % TILE or (size != whole and size % half):
                return False
        return super().takes(piece, rows, keys)

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


def _pytorch_allows(head_dim: int) -> bool:
    """Whether PyTorch uses cuDNN for it on this GPU. It depends on the cuDNN front end that PyTorch was built with."""
    x = torch.empty(1, 1, TILE, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return can_use_cudnn_attention(SDPAParams(x, x, x, None, 0.0, False, False))
