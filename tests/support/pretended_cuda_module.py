"""`torch.cuda`, NCCL and Triton of a process with a pretended GPU (`pretended_cuda.py`)."""

import atexit
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.gpu_calls import all_arguments, arguments_of_launch

counted: Counter[str] = Counter()  # calls of attention libraries and launches of Triton's kernels, by name
pretended = torch.ops.pretended
PROPERTIES = SimpleNamespace(multi_processor_count=132, total_memory=80 * 2**30, name="pretended", major=9, minor=0)
RUNTIME = SimpleNamespace(
    cudaHostRegister=lambda address, size, flags: pretended.pin(address, size),
    cudaHostUnregister=lambda address: pretended.pin(address, 0),
)


class Event(torch.Event):
    """As `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, device=_device(), enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(stream or _current_stream())

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(stream or _current_stream())


class Stream(torch.Stream):
    """As `torch.cuda.Stream`."""

    def __new__(cls, device: object = None, priority: int = 0, **number: int) -> "Stream":
        return super().__new__(cls, **number) if number else super().__new__(cls, device=_device())

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _numbered(stream: int) -> Stream:
    return Stream(stream_id=stream, device_index=torch.cuda.current_device(), device_type=1)


def _current_stream(device: object = None) -> Stream:
    return _numbered(pretended.current_stream())


def _set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        pretended.set_stream(stream.stream_id)


class _Within:
    """As `torch.cuda.StreamContext`: it may be entered several times."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = pretended.current_stream()
        _set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        pretended.set_stream(self.before)


class _Current:
    def __init__(self) -> None:
        self.device = 0

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            self.device = index
            pretended.set_device(index)


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    if storage.device.type == "cuda":
        pretended.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
    else:
        resize_storage(storage, size)


def _move(storage: torch.UntypedStorage, device: torch.device, non_blocking: bool = False) -> torch.UntypedStorage:
    """A copy on a device, as `torch.load` makes it."""
    if torch.device(device).type == "cuda":
        return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()
    return move_storage(storage, device=device, non_blocking=non_blocking)


resize_storage, move_storage = torch.UntypedStorage.resize_, torch.UntypedStorage.to
compile = torch.compile


def _compile(function: Callable | None = None, *, backend: Any = "inductor", **how: Any) -> Callable:
    """Traces where a backend without a compiler was asked for."""
    if function is None:
        return lambda later: _compile(later, backend=backend, **how)
    return compile(function, backend=backend, **how) if backend in ("eager", "aot_eager") else function


def install(capability: tuple[int, int], library: Path) -> None:
    """Gives PyTorch the functions that ask a GPU."""
    from tests.support.recorded_graph import RecordedGraph, recording

    @contextmanager
    def capture(graph: RecordedGraph, **how: Any) -> Iterator[None]:
        pretended.capture(True)
        try:
            with _Within(how["stream"]), recording(graph, **how):
                yield
        finally:
            pretended.capture(False)

    current = _Current()
    generator = torch.default_generator
    cuda: dict[str, object] = {
        "CUDAGraph": RecordedGraph,
        "Event": Event,
        "Stream": Stream,
        "StreamContext": _Within,
        "_exchange_device": lambda device: current.device,
        "_maybe_exchange_device": lambda device: current.device,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_sleep": lambda cycles: None,
        "check_error": lambda code: None,
        "cudart": lambda: RUNTIME,
        "current_device": lambda: current.device,
        "current_stream": _current_stream,
        "default_generators": (generator,) * 8,
        "default_stream": lambda device=None: _numbered(0),
        "device_count": lambda: 8,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "graph": capture,
        "graph_pool_handle": object,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "max_memory_allocated": lambda device=None: 1,
        "mem_get_info": lambda device=None: (2**34, 2**36),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "seed_all": generator.seed,
        "set_device": current.set_device,
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_stream": _set_stream,
        "set_sync_debug_mode": lambda mode: pretended.warn(mode == "warn"),
        "stream": _Within,
        "synchronize": lambda device=None: pretended.synchronize(),
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.compile = _compile
    torch._C._cuda_getDevice = lambda: current.device
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # Dynamo imports it
    torch.UntypedStorage.resize_, torch.UntypedStorage.to = _resize, _move
    torch.cuda.nccl.version = lambda: (2, 28, 9)
    torch.backends.cudnn.version = lambda: 91900
    torch.backends.cuda.is_flash_attention_available = lambda: True
    _use_gloo_as_nccl(library)
    _see_the_host()
    _compute_by_definition()
    ForkingPickler.register(Tensor, lambda x: reductions.reduce_tensor(x.detach().cpu() if x.is_cuda else x))


def _compute_by_definition() -> None:
    """Attention libraries and launches of Triton's kernels."""
    import triton

    from tests.support.gpu_kernels import LIBRARIES

    for name, by_definition in LIBRARIES.items():
        _implement(name, _on_host(name, by_definition))
    for name in ("_softmax", "_log_softmax"):
        _implement(name, partial(_softmax, getattr(torch.ops.aten, name)))
        backward = f"{name}_backward_data"
        _implement(backward, partial(_softmax_backward, getattr(torch.ops.aten, backward)))
    triton.runtime.jit.JITFunction.run = _launch


def _implement(name: str, function: Callable) -> None:
    torch.library.impl(f"aten::{name}", "CUDA", function)


def _on_host(name: str, by_definition: Callable) -> Callable:
    op = getattr(torch.ops.aten, name).default

    def call(*args: Any, **how: Any) -> Any:
        counted[name] += 1
        given = all_arguments(op, args, how)
        return _launched(name, given, by_definition(*tree_map_only(Tensor, _host, given)))

    return call


def _launched(name: str, given: tuple, found: Any) -> Any:
    """Results of an operation on the current stream, on the device."""
    found = tree_map_only(Tensor, pretended.device, found)
    reads, results = ([x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_cuda] for tree in (given, found))
    pretended.launch(name, reads, results)
    return found


def _softmax(op: Callable, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """A GPU makes float32 of 16 bits in it. A CPU does not."""
    on_host = _host(x)
    return _launched(op.__name__, (x,), op(on_host.float() if half_to_float else on_host, dim, False))


def _softmax_backward(op: Callable, grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return _launched(op.__name__, (grad, out), op(_host(grad), _host(out), dim, out.dtype).to(dtype))


def _host(x: Tensor) -> Tensor:
    return pretended.host(x) if x.is_cuda else x


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **how: Any) -> None:
    """In place of a launch of a Triton kernel."""
    from tests.support.gpu_kernels import KERNELS, WRITTEN
    from tests.support.recorded_graph import launch

    given = arguments_of_launch(kernel, args, how, grid)
    name = kernel.__name__
    counted[name] += 1
    tensors = {word: x for word, x in given.items() if isinstance(x, Tensor)}
    words = [word for word in WRITTEN[name] if word != "dq" or given.get("WITH_DQ", True)]
    written = [tensors.pop(word) for word in words if word in tensors]

    def run(**given: Any) -> None:
        pretended.launch(name, list(tensors.values()), written)
        KERNELS[name](**given)

    launch(run)(**tree_map_only(Tensor, _host, given))


def _use_gloo_as_nccl(library: Path) -> None:
    """NCCL's process groups."""
    loader = ExtensionFileLoader("pretended_nccl", str(library))
    module = module_from_spec(spec_from_file_location("pretended_nccl", loader=loader))
    loader.exec_module(module)

    class ProcessGroupNCCL(module.Nccl):
        Options = module.Options

        def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=options._timeout)
            super().__init__(gloo, options, hasattr(dist, "ProcessGroupNCCL2"))

    if os.environ.get("PRETENDED_NCCL2") == "1":  # that of torch 2.15
        dist.ProcessGroupNCCL2 = ProcessGroupNCCL
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)


def _see_the_host() -> None:
    """What Python reads without an operator; and races that only the end of the process can report."""
    for name in ("tolist", "numpy", "__array__"):
        setattr(Tensor, name, _after_reading(getattr(Tensor, name)))
    atexit.register(_end)


def _after_reading(method: Callable) -> Callable:
    @wraps(method)
    def read(x: Tensor, *args: Any, **how: Any) -> Any:
        if x.layout is torch.strided and x.device.type == "cpu" and type(x) is Tensor:
            pretended.host_reads(x)
        return method(x, *args, **how)

    return read


def _end() -> None:
    if pretended.races():
        os._exit(1)
