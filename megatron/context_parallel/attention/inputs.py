"""Checks the inputs of attention, orders their dimensions, and casts them for autocast."""

from collections import deque
from numbers import Real
from types import NoneType

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.torch_dispatcher import in_transform
from megatron.context_parallel.strategies import Choice
from megatron.context_parallel.tokens.documents import Documents

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ORDERS = {"sbhd": (0, 1, 2, 3), "bshd": (1, 0, 2, 3), "bhsd": (2, 0, 1, 3)}  # the dimensions of s, b, h and d
INVERSE = {"sbhd": (0, 1, 2, 3), "bshd": (1, 0, 2, 3), "bhsd": (1, 2, 0, 3)}


def to_sbhd(x: Tensor, tensor_layout: str) -> Tensor:
    return x if tensor_layout == "sbhd" else x.permute(ORDERS[tensor_layout])


def from_sbhd(x: Tensor, tensor_layout: str) -> Tensor:
    """The inverse of `to_sbhd`; the last dimension may be missing."""
    return x if tensor_layout == "sbhd" else x.permute(INVERSE[tensor_layout][: x.dim()])


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of torch.autocast, like the inputs of `scaled_dot_product_attention`."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # it raises for meta tensors
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype is torch.float64 or not x.is_floating_point() else x.to(dtype) for x in tensors)


_TENSORS = {"q": "[s, b, heads, d]", "k": "[t, b, kv_heads, d]", "v": "[t, b, kv_heads, dv]", "sinks": "[heads]"}
# For the other arguments: their types, and the advice of the error.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "documents": ((Documents, NoneType), "Documents(ids), with ids int [samples, length], or None"),
    "scale": ((Real, NoneType), "a number, such as 0.125, or None for 1 / sqrt(head_dim)"),
    "softcap": ((Real,), "a number, such as 50.0, or 0 for none"),
    "return_lse": ((bool,), "True or False"),
    "kept": ((deque, NoneType), "collections.deque(), or None"),
    "tensor_layout": ((str,), "one of sbhd, bshd and bhsd"),
}


def check_types(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **others: object) -> None:
    """Raises UsageError for arguments of `context_parallel_attention` with a wrong type."""
    for (name, shape), x in zip(_TENSORS.items(), (q, k, v, sinks), strict=True):
        if name == "sinks" and x is None:
            continue
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            kind = f"type {type(x).__name__}" if type(x) is not Tensor else "a sparse or nested layout"
            raise UsageError(f"{name} of {kind}: need a dense tensor {shape}")
    for name, value in others.items():
        types, works = _TYPES[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise UsageError(f"{name} of type {type(value).__name__}: give {works}")


def check_kernel(kernel: object, kept: object) -> None:
    """Raises UsageError if `kernel` is not a `kernels.Kernel`, and for either of them under torch.compile."""
    if torch.compiler.is_compiling() and (kernel is not None or kept is not None):
        raise UsageError("torch.compile: `kernel` and `kept` are not supported; leave them out")
    needed = ("pieces", "forward", "backward")
    if kernel is not None and (isinstance(kernel, type) or not all(hasattr(kernel, name) for name in needed)):
        what = f"the class {kernel.__name__}" if isinstance(kernel, type) else f"of type {type(kernel).__name__}"
        raise UsageError(
            f"kernel {what}: give an object, such as kernels.choose.kernel_for(q.device, q.dtype, q.shape[-1], 'aten')"
        )


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raises UsageError for tensors with forward-mode derivatives, and inside the transforms of torch.func."""
    if in_transform():
        raise UsageError(
            "torch.func: context_parallel_attention does not support jvp, grad, vjp and similar transforms; use "
            "torch.autograd.grad or backward()"
        )
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise UsageError(
            "forward-mode derivatives: context_parallel_attention does not support them; use torch.autograd.grad or "
            "backward()"
        )


def refuse_jit_trace() -> None:
    """Raises UsageError under torch.jit.trace: see `saved_program`."""
    if torch.jit.is_tracing():
        raise saved_program("torch.jit.trace")


def refuse_export() -> None:
    """Raises UsageError under torch.export: see `saved_program`.

    Call it where Dynamo does not trace: in code that it traces, `is_exporting` is always true with torch 2.11.
    """
    if torch.compiler.is_exporting():
        raise saved_program("torch.export")


def saved_program(way: str) -> UsageError:
    """The error of what saves a program.

    It has the number of the context group, which in another process is that of another group, or of none.
    """
    return UsageError(f"{way}: context_parallel_attention belongs to the ranks of this job; use torch.compile")


def check(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tensor_layout: str = "sbhd", *, smallest: int = 1
) -> None:
    """Raises UsageError for tensors with incompatible shapes, dtypes or devices, or fewer tokens than `smallest`."""
    if tensor_layout not in ORDERS:
        raise UsageError(f"tensor_layout {tensor_layout!r}: unknown; give one of {', '.join(ORDERS)}")
    s, b, h, d = ORDERS[tensor_layout]
    fits = q.dim() == k.dim() == v.dim() == 4 and all(k.shape[i] == v.shape[i] for i in (s, b, h))
    if not fits or (q.shape[b], q.shape[d]) != (k.shape[b], k.shape[d]):
        raise UsageError(f"{_shapes(q, k, v)}: need {_needed(tensor_layout)}")
    if 0 in [x.shape[i] for x in (q, k, v) for i in (b, h, d)] or min(q.shape[s], k.shape[s]) < smallest:
        raise UsageError(f"{_shapes(q, k, v)}: a size is 0; each must be 1 or more")
    heads, kv_heads = q.shape[h], k.shape[h]
    if heads % kv_heads:
        raise UsageError(f"{kv_heads} key/value heads do not divide {heads} query heads")
    if not q.dtype == k.dtype == v.dtype:
        raise UsageError(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: need one dtype")
    if q.dtype not in DTYPES:
        raise UsageError(f"q, k, v of {q.dtype}: need one of {', '.join(map(str, DTYPES))}")
    if not q.device == k.device == v.device:
        raise UsageError(f"q, k, v on {q.device}, {k.device}, {v.device}: need one device")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in DTYPES or sinks.device != q.device):
        raise UsageError(
            f"sinks {list(sinks.shape)} of {sinks.dtype} on {sinks.device}: need floating-point [{heads}], one per "
            f"query head, on {q.device}"
        )


def check_partials(choice: Choice, dtype: torch.dtype) -> None:
    """Raises UsageError if partials are sent in 16 bits and the inputs have more."""
    if choice.partials_in_16_bits and dtype.itemsize > 2:
        raise UsageError(f"--cp-partials-in-16-bits: q, k, v of {dtype}; give bfloat16 or float16, or leave it out")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def _needed(tensor_layout: str) -> str:
    sizes = {"q": ("s", "b", "heads", "d"), "k": ("t", "b", "kv_heads", "d"), "v": ("t", "b", "kv_heads", "dv")}
    needed = []
    for x, names in sizes.items():
        ordered = [names[i] for i in INVERSE[tensor_layout]]
        needed.append(f"{x} [{', '.join(ordered)}]")
    q, k, v = needed
    return f"{q}, {k} and {v}"
