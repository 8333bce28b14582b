"""A pretended GPU: its tensors say `cuda:0` and compute on the CPU. It refuses what a GPU refuses, and warns of waits.

It lasts for a block, in any process. `pretended_cuda.py` has a whole process with a GPU.
"""

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

from tests.support.gpu_calls import Event, all_arguments, arguments_of_launch
from tests.support.gpu_kernels import KERNELS, LIBRARIES

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
        args, how = all_arguments(op, args, how), {}
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


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **how: Any) -> None:
    """In place of a launch of a Triton kernel."""
    given = arguments_of_launch(kernel, args, how, grid)
    gpu.launches[kernel.__name__] += 1
    with _disable_current_modes():
        KERNELS[kernel.__name__](**{name: x.host if isinstance(x, OnGpu) else x for name, x in given.items()})


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
