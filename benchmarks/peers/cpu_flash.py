"""flash-attn's functions on a CPU: ATen's CPU flash attention, the kernel that this project uses there too.

Libraries written for flash-attn import it by name; `install` puts this in its place. It adds nothing but one copy of
the gradients: flash-attn writes them into tensors it is given, ATen returns new ones. On an emulated cluster with
devices the functions take a device's time instead.
"""

import importlib.machinery
import inspect
import sys
import types
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megatron.context_parallel.kernels.masks import CAUSAL, FULL

from ..device import EmulatedDevice
from ..stopwatch import Stopwatch

_ops = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [b, s, heads, d] and log-sum-exp [b, heads, s] of q [b, s, heads, d] and k, v [b, s, kv_heads, d]."""
    batch, kv_heads = k.shape[0], k.shape[2]
    inputs = (_folded(q, kv_heads), *_shared(q, k, v))
    out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
    return _unfolded(out, batch, kv_heads), lse.reshape(batch, q.shape[2], -1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    """dq, dk and dv in the shapes of q, k and v."""
    batch, kv_heads = k.shape[0], k.shape[2]
    inputs = (_folded(dout, kv_heads), _folded(q, kv_heads), *_shared(q, k, v), _folded(out, kv_heads))
    lse = lse.reshape(inputs[1].shape[:-1])
    grads = _ops._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse, 0.0, causal, scale=scale)
    dq, *dkv = (_unfolded(x, batch, kv_heads) for x in grads)
    return dq, *(x if x.shape == k.shape else x.unflatten(2, (kv_heads, -1)).sum(3) for x in dkv)


def _folded(x: Tensor, kv_heads: int) -> Tensor:
    """[b, s, heads, d] as the kernel takes it; with heads that share keys, [b * kv_heads, heads / kv_heads, s, d]."""
    if x.shape[2] == kv_heads:
        return x.transpose(1, 2)
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)


def _shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Keys and values with one head per query head, those of a group in the same memory."""
    group = q.shape[2] // k.shape[2]
    if group == 1:
        return k.transpose(1, 2), v.transpose(1, 2)
    return tuple(x.transpose(1, 2).flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))


def _unfolded(x: Tensor, batch: int, kv_heads: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2)


class CpuFlash:
    """`forward` and `backward`, timed as "kernel". A device that does not compute takes its time and gives zeros."""

    def __init__(self, watch: Stopwatch, device: EmulatedDevice | None = None) -> None:
        self.device = device
        self.forward = watch.timed("kernel", self._forward)
        self.backward = watch.timed("kernel", self._backward)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        if self.device is None or self.device.computes:
            return forward(q, k, v, scale, causal)
        batch, rows, heads, _ = q.shape
        with self._call(q, k, causal, backward=False):
            return q.new_zeros(q.shape), q.new_zeros(batch, heads, rows, dtype=torch.float32)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, ...]:
        if self.device is None or self.device.computes:
            return backward(dout, q, k, v, out, lse, scale, causal)
        with self._call(q, k, causal, backward=True):
            return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)

    def _call(self, q: Tensor, k: Tensor, causal: bool, backward: bool) -> AbstractContextManager[None]:
        heads = q.shape[0] * q.shape[2]
        return self.device.call(heads, q.shape[1], k.shape[1], CAUSAL if causal else FULL, backward)


class FlashAttention(torch.autograd.Function):
    """Attention of whole sequences, [b, s, heads, d], for libraries that take any attention function."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, flash):
        out, lse = flash.forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = scale, causal, flash
        return out

    @staticmethod
    def backward(ctx, dout):
        scale, causal, flash = ctx.rest
        return *flash.backward(dout, *ctx.saved_tensors, scale, causal), None, None, None


def install(flash: CpuFlash) -> None:
    """Makes `import flash_attn` give the functions of `flash`, with flash-attn 2.8's names and arguments."""

    # The libraries read the names and defaults of these arguments.
    def flash_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        return *flash.forward(q, k, v, softmax_scale, causal), None, None

    def flash_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        grads = flash.backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)

    def flash_function(q, k, v, softmax_scale=None, causal=False, **others):
        return FlashAttention.apply(q, k, v, softmax_scale, causal, flash)

    def missing(*args, **kwargs):
        raise NotImplementedError("this function of flash-attn has no stand-in on a CPU")

    package, interface = (types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface"))
    for module in (package, interface):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    package.__version__, package.flash_attn_interface = "2.8.3", interface
    package.flash_attn_func = flash_function
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = missing
    interface._flash_attn_forward, interface._flash_attn_backward = flash_forward, flash_backward


def copy_gradient_buffers(module: types.ModuleType) -> None:
    """Fixes a ring of the ring-flash-attn family for float32.

    It takes the first block's gradients out of a buffer with `.to(torch.float32)`, a copy of 16-bit gradients but of
    float32 ones the buffer itself, which the next block overwrites. Here it copies those too.
    """
    source = inspect.getsource(module)
    mended = source.replace("_buffer.to(torch.float32)", "_buffer.to(torch.float32, copy=True)")
    if mended == source:
        raise ValueError(f"{module.__name__} is not the version this adapter was written for; see requirements.txt")
    exec(compile(mended, module.__file__, "exec"), module.__dict__)
