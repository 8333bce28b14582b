"""flash-attn 3, for Hopper."""

import os
from collections.abc import Sequence

import torch

from megatron.context_parallel.errors import UsageError

from .base import Capability, Library, RefuseBlock


class FlashAttention3(Library):
    """flash-attn 3, called through its operators: unlike its Python functions, they have one signature in all builds.

    Raises:
        UsageError: NCCL_MAX_CTAS is not a number.
    """

    name, title, module = "flash3", "flash-attn 3", "flash_attn_3._C"

    def __init__(self, *, deterministic: bool = False, refuse: RefuseBlock | None = None) -> None:
        super().__init__(deterministic=deterministic, refuse=refuse)  # registers the operators
        self.calls = torch.ops.flash_attn_3
        # Its thread blocks are persistent. On all multiprocessors they would block NCCL until the kernel ends.
        most = os.environ.get("NCCL_MAX_CTAS", "0")
        if not most.isdecimal():
            raise UsageError(f"NCCL_MAX_CTAS={most}: must be a count of thread blocks, such as 16, or unset")
        self.launch_options = {"sm_margin": int(most)}

    @classmethod
    def head_dims(cls, capability: Capability, *, deterministic: bool) -> Sequence[int]:
        # mha_bwd in hopper/flash_api.cpp does not support deterministic gradients of tiles for 256.
        return range(8, (0 if capability != (9, 0) else 192 if deterministic else 256) + 1, 8)

    def _forward(self, q, k, v, causal, scale):
        return self.calls.fwd(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1, **self.launch_options)[:2]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.calls.bwd(
            *(dout, q, k, v, out, lse, *grads),
            softmax_scale=scale,
            is_causal=causal,
            deterministic=self.deterministic,
            **self.launch_options,
        )
        return grads
