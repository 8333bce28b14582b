"""A pretended GPU: its tensors say `cuda:0` and compute on the CPU. It refuses what a GPU refuses, and warns of waits.

Attention of PyTorch for CUDA, and our Triton kernels, are computed by definition from the arguments of the real calls.
Kernels themselves run in Triton's interpreter (`tests/kernels/test_position_kernel.py`).
"""

import math
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from megatron.context_parallel.kernels.delta import output_with
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, PieceMask
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.kernels.paged import Seen
from megatron.context_parallel.kernels.quantized import unpack
from megatron.context_parallel.kernels.reference import Reference

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
_CUBLAS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot"}
_TO_HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}  # the host waits for their result
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}


class OnGpu(Tensor):
    """A tensor of the pretended GPU; `host` has its numbers. Only Python sees the device: C++ has none of that kind."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = True
    is_cpu = False

    @staticmethod
    def __new__(cls, host: Tensor) -> "OnGpu":
        places = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, device=HOST, **places)

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __repr__(self) -> str:
        return f"OnGpu({self.host})"

    def to(self, *args: Any, **how: Any) -> Tensor:
        target = next((x for x in args if isinstance(x, torch.device | str)), how.get("device", GPU))
        if torch.device(target).type == "cuda":
            args = tuple(x for x in args if not isinstance(x, torch.device | str))
            how.pop("device", None)
            return super().to(*args, **how) if args or how.get("dtype") else self
        _wait()
        return self.host.detach().to(*args, **how).clone()

    def cpu(self) -> Tensor:
        return self.to(HOST)

    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple = (), how: dict | None = None) -> Any:
        return _run(op, args, how or {})


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), how: dict | None = None) -> Any:
        return _run(op, args, how or {})


class Gpu:
    """What happened on the pretended GPU.

    Attributes:
        launches: of Triton's kernels, by name.
        operators: of attention libraries, by name.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.warns = False


gpu = Gpu()


def _wait() -> None:
    if gpu.warns:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)


def _run(op: Any, args: tuple, how: dict) -> Any:
    """An operator, on the CPU."""
    if op.namespace == "context_parallel":  # its own code runs, below autograd
        with _Device():
            return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **how)
    name = op._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_flatten((args, how))[0] if isinstance(x, Tensor)]
    on_gpu = any(isinstance(x, OnGpu) for x in tensors)
    to = how.get("device")
    into_gpu = on_gpu if to is None else torch.device(to).type == "cuda"
    _refuse_or_wait(name, args, how, tensors, into_gpu)
    call = op
    if name in LIBRARIES:
        gpu.operators[name] += 1
        call = LIBRARIES[name]
        given = {x.name: x.default_value for x in op._schema.arguments}  # PyTorch leaves out defaults
        given |= dict(zip(given, args, strict=False)) | how
        args, how = tuple(given.values()), {}
    ours = {id(x.host): x for x in tensors if isinstance(x, OnGpu)}
    args, how = tree_map(lambda x: x.host if isinstance(x, OnGpu) else x, (args, how))
    if to is not None:
        how["device"] = HOST

    def up(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return ours[id(x)] if id(x) in ours else OnGpu(x) if into_gpu else x

    return tree_map(up, call(*args, **how))


def _refuse_or_wait(name: str, args: tuple, how: dict, tensors: list[Tensor], into_gpu: bool) -> None:
    """As PyTorch does before it runs an operator on a GPU.

    Raises:
        RuntimeError: tensors of two devices, or cuBLAS in deterministic mode.
    """
    on_gpu = [x for x in tensors if isinstance(x, OnGpu)]
    on_host = [x for x in tensors if not isinstance(x, OnGpu) and x.dim()]
    if name in _CUBLAS and on_gpu and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("Deterministic behavior was enabled, but this operation uses CuBLAS")
    if on_gpu and on_host and name not in _COPIES | {"index"}:
        raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
    blocking = not (how.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    crosses = name in _COPIES and blocking and ((on_gpu and on_host) or into_gpu != bool(on_gpu))
    indices_of_the_host = name == "index" and on_gpu and on_host
    if crosses or indices_of_the_host or (name in _TO_HOST and on_gpu):
        _wait()


def _attend(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """The scores [heads, s, t] of [1, s, heads, d]; the last rows see all keys."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("shd,thd->hst", q[0].float(), k[0].float().repeat_interleave(group, 1)) * scale
    return scores.masked_fill(~torch.ones_like(scores[0], dtype=torch.bool).tril(), -torch.inf) if causal else scores


def _flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, scale, *_):
    scores = _attend(q, k, causal, scale)
    values = v[0].float().repeat_interleave(q.shape[2] // k.shape[2], 1)
    out = torch.einsum("hst,thd->shd", scores.softmax(-1), values)[None]
    unused = torch.zeros(2, dtype=torch.uint64)
    return out.to(q.dtype), scores.logsumexp(-1)[None], unused, unused, unused


def _flash_backward(
    dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, scale, *_
):  # fmt: skip
    group = q.shape[2] // k.shape[2]
    p = (_attend(q, k, causal, scale) - lse[0].unsqueeze(-1)).exp()
    grads, values = dout[0].float(), v[0].float().repeat_interleave(group, 1)
    dp = torch.einsum("shd,thd->hst", grads, values)
    ds = p * (dp - (grads * out[0].float()).sum(-1).T.unsqueeze(-1)) * scale
    dq = torch.einsum("hst,thd->shd", ds, k[0].float().repeat_interleave(group, 1))
    dk, dv = (torch.einsum("hst,shd->thd", x, y) for x, y in ((ds, q[0].float()), (p, grads)))
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return tuple(x.to(q.dtype)[None] for x in (dq, dk, dv))


def _cudnn(q, k, v, bias, with_lse, dropout, causal, debug, scale):
    out, lse, *_ = _flash(*(x.transpose(1, 2) for x in (q, k, v)), None, None, 0, 0, 0.0, causal, False, scale)
    number = torch.zeros((), dtype=torch.int64)
    return out.transpose(1, 2), lse.unsqueeze(-1), None, None, 0, 0, number, number, None


def _cudnn_backward(dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, scale):
    rows_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = _flash_backward(*rows_first, lse.squeeze(-1), None, None, max_q, max_k, 0.0, causal, None, None, scale)
    return tuple(x.transpose(1, 2) for x in grads)


LIBRARIES = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}


class Event:
    """As `torch.cuda.Event`: complete at once."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **how: Any) -> None:
    """In place of a launch of a Triton kernel."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | how
    for name, x in given.items():
        if isinstance(x, Tensor) and not isinstance(x, OnGpu):
            raise ValueError(
                f"Pointer argument {name} of {kernel.__name__} cannot be accessed from Triton (cpu tensor?)"
            )
    assert min(grid) > 0, (kernel.__name__, grid)
    gpu.launches[kernel.__name__] += 1
    with _disable_current_modes():
        KERNELS[kernel.__name__](**{name: x.host if isinstance(x, OnGpu) else x for name, x in given.items()})


def _mask(x: dict) -> PieceMask:
    return KeyRanges(x["first"], x["end"]) if x["MASK"] == "key_ranges" else x["MASK"]


def _forward(**x: Any) -> None:
    out, lse = Reference().forward(x["q"], x["k"], x["v"], _mask(x), Scores(x["scale"], x["SOFTCAP"]))
    x["out"].copy_(out)
    x["lse"].copy_(lse)


def _few_rows(**x: Any) -> None:
    for part, (out, lse) in enumerate(zip(x["out"], x["lse"], strict=True)):
        keys = slice(part * x["keys_a_part"], min((part + 1) * x["keys_a_part"], x["t"]))
        mask = _mask(x)
        if mask == CAUSAL:
            up = torch.arange(1, x["s"] + 1, dtype=torch.int32)[None]
            mask = KeyRanges(0 * up, up)
        mask = mask.of(slice(None), keys) if isinstance(mask, KeyRanges) else mask
        scores = Scores(x["scale"], x["SOFTCAP"])
        its_out, its_lse = Reference().forward(x["q"], x["k"][keys], x["v"][keys], mask, scores)
        out.copy_(its_out.transpose(0, 1).flatten(1, 2))
        lse.copy_(its_lse.transpose(0, 1).flatten(1, 2))


def _merge_parts(**x: Any) -> None:
    """The rows of a part are in one line: by head, row, and query head of a group."""
    lse_of_parts, out_of_parts = x["lse_of_parts"].flatten(1), x["out_of_parts"].flatten(1, -2)
    lse = lse_of_parts.logsumexp(0)
    weights = (lse_of_parts - lse.masked_fill(lse.isneginf(), 0.0)).exp().unsqueeze(-1)
    line = x["heads"], x["s"], x["group"]
    out = (weights * out_of_parts).sum(0).unflatten(0, line).transpose(0, 1)
    x["out"].copy_(out.reshape(x["out"].shape))
    x["lse"].copy_(lse.unflatten(0, line).transpose(0, 1).reshape(x["lse"].shape))


def _paged(**x: Any) -> None:
    """All keys of a row in the first part."""
    x["out"].zero_()
    x["lse"].fill_(-torch.inf)
    seen = Seen(x["table"], x["first"], x["end"], x["PAGE"])
    attend_to_pages(x["q"], x["k"], x["v"], seen, x["scale"], x["out"][0], x["lse"][0], x["FORM"])


def attend_to_pages(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float, out: Tensor, lse: Tensor, form: str | None
) -> None:
    """As `PagedKernel.forward`, by definition."""
    if form:
        k, v = (unpack(x, form, q.dtype) for x in (k, v))
    for row, (first, end) in enumerate(zip(seen.first.tolist(), seen.end.tolist(), strict=True)):
        at = torch.arange(first, end)
        slots = seen.table[row].long()[at // seen.page] * seen.page + at % seen.page
        by_key = q[row].unflatten(0, (k.shape[1], -1)).unsqueeze(0)
        found, log = Reference().forward(by_key, k[slots], v[slots], FULL, Scores(scale))
        out[row].copy_(found.flatten(1, 2)[0])
        lse[row].copy_(log.flatten(1, 2)[0])


def _gradients(x: dict, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    q, dout = x["q"], x["dout"]
    k, v = (y.repeat_interleave(parts, 1) for y in (x["k"], x["v"]))
    lse, delta = (y.view(*q.shape[1:3], -1).permute(2, 0, 1) for y in (x["lse2"] * math.log(2), x["delta"]))
    return Reference().backward(BlockGrad(dout, q, k, v, lse, delta, _mask(x)), Scores(x["scale"], x["SOFTCAP"]))


def _query_grad(**x: Any) -> None:
    x["dq"].copy_(_gradients(x, 1)[0])


def _key_grad(**x: Any) -> None:
    dq, dk, dv = _gradients(x, x["parts"])
    x["dk"].copy_(dk)
    x["dv"].copy_(dv)
    if x["WITH_DQ"]:
        x["dq"].add_(dq)


def _by_head(**x: Any) -> None:
    x["lse2"].copy_(x["lse"].permute(1, 2, 0).flatten(0, 1) / math.log(2))
    x["delta_out"].copy_(x["delta"].permute(1, 2, 0).flatten(0, 1))


def _merge(**x: Any) -> None:
    merge(x["out"], x["lse"], x["other_out"], x["other_lse"])


def _output(**x: Any) -> None:
    x["out"].copy_(output_with(x["delta"], x["dout"]))


KERNELS = {
    "forward_kernel": _forward,
    "few_rows_kernel": _few_rows,
    "paged_kernel": _paged,
    "merge_parts_kernel": _merge_parts,
    "query_grad_kernel": _query_grad,
    "key_grad_kernel": _key_grad,
    "by_head_kernel": _by_head,
    "merge_kernel": _merge,
    "output_kernel": _output,
}


def _warn(mode: str) -> None:
    gpu.warns = mode == "warn"


@contextmanager
def pretended_gpu(capability: tuple[int, int] = (9, 0)):
    """Yields the `Gpu` that PyTorch has meanwhile."""
    import triton

    gpu.__init__()
    properties = SimpleNamespace(multi_processor_count=132, total_memory=80 * 2**30, name="pretended")
    cuda: dict[str, object] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "pretended",
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (2**40, 2**40),
        "Event": Event,
        "synchronize": lambda device=None: None,
        "set_sync_debug_mode": _warn,
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 1,
        "memory_allocated": lambda device=None: 0,
        "_sleep": lambda cycles: None,
        "set_device": lambda device: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        patch.setattr(Tensor, "pin_memory", lambda self, device=None: self.clone())
        patch.setattr(triton.runtime.jit.JITFunction, "run", _launch)
        with _Device():
            yield gpu
