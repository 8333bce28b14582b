"""`torch.cuda`, NCCL and Triton of a process with a pretended GPU (`pretended_cuda.py`)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils._pytree import tree_map_only

from tests.support.gpu_calls import Event, all_arguments, arguments_of_launch

CUDA_OPERATORS = torch.library.Library("aten", "IMPL", "CUDA")
counted: Counter[str] = Counter()  # calls of attention libraries and launches of Triton's kernels, by name
pretended = torch.ops.pretended
PROPERTIES = SimpleNamespace(multi_processor_count=132, total_memory=80 * 2**30, name="pretended", major=9, minor=0)
RUNTIME = SimpleNamespace(
    cudaHostRegister=lambda address, size, flags: pretended.pin(address, size),
    cudaHostUnregister=lambda address: pretended.pin(address, 0),
)


class Stream(torch.Stream):
    """As `torch.cuda.Stream`: its work is done at once."""

    def __new__(cls, device: object = None, priority: int = 0) -> "Stream":
        return super().__new__(cls, device=torch.device("cuda", torch.cuda.current_device()))

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class _Current:
    def __init__(self) -> None:
        self.device = 0
        self.streams: list[Stream] = []

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            self.device = index
            pretended.set_device(index)

    def stream(self, device: object = None) -> Stream:
        if not self.streams:
            self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def within(self, stream: Stream | None):
        self.streams.append(stream or self.stream())
        try:
            yield
        finally:
            self.streams.pop()


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


def install(capability: tuple[int, int]) -> None:
    """Gives PyTorch the functions that ask a GPU."""
    from tests.support.recorded_graph import RecordedGraph, recording

    @contextmanager
    def capture(graph: RecordedGraph, **how: Any) -> Iterator[None]:
        pretended.capture(True)
        try:
            with recording(graph, **how):
                yield
        finally:
            pretended.capture(False)

    current = _Current()
    generator = torch.default_generator
    cuda: dict[str, object] = {
        "CUDAGraph": RecordedGraph,
        "Event": Event,
        "Stream": Stream,
        "_exchange_device": lambda device: current.device,
        "_maybe_exchange_device": lambda device: current.device,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_sleep": lambda cycles: None,
        "check_error": lambda code: None,
        "cudart": lambda: RUNTIME,
        "current_device": lambda: current.device,
        "current_stream": current.stream,
        "default_generators": (generator,) * 8,
        "default_stream": current.stream,
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
        "set_stream": lambda stream: None,
        "set_sync_debug_mode": lambda mode: pretended.warn(mode == "warn"),
        "stream": current.within,
        "synchronize": lambda device=None: None,
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.compile = _compile
    torch._C._cuda_getDevice = lambda: current.device
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # Dynamo imports it
    torch.UntypedStorage.resize_, torch.UntypedStorage.to = _resize, _move
    torch.backends.cudnn.version = lambda: 91900
    torch.backends.cuda.is_flash_attention_available = lambda: True
    _use_gloo_as_nccl()
    _compute_by_definition()
    ForkingPickler.register(Tensor, lambda x: reductions.reduce_tensor(x.detach().cpu() if x.is_cuda else x))


def _compute_by_definition() -> None:
    """Attention libraries and launches of Triton's kernels."""
    import triton

    from tests.support.gpu_kernels import LIBRARIES

    for name, by_definition in LIBRARIES.items():
        CUDA_OPERATORS.impl(name, _on_host(name, by_definition))
    for name in ("_softmax", "_log_softmax"):
        CUDA_OPERATORS.impl(name, partial(_softmax, getattr(torch.ops.aten, name)))
        backward = f"{name}_backward_data"
        CUDA_OPERATORS.impl(backward, partial(_softmax_backward, getattr(torch.ops.aten, backward)))
    triton.runtime.jit.JITFunction.run = _launch


def _on_host(name: str, by_definition: Callable) -> Callable:
    op = getattr(torch.ops.aten, name).default

    def call(*args: Any, **how: Any) -> Any:
        counted[name] += 1
        found = by_definition(*tree_map_only(Tensor, _host, all_arguments(op, args, how)))
        return tree_map_only(Tensor, pretended.device, found)

    return call


def _softmax(op: Callable, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """A GPU makes float32 of 16 bits in it. A CPU does not."""
    x = _host(x)
    return pretended.device(op(x.float() if half_to_float else x, dim, False))


def _softmax_backward(op: Callable, grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return pretended.device(op(_host(grad), _host(out), dim, out.dtype).to(dtype))


def _host(x: Tensor) -> Tensor:
    return pretended.host(x) if x.is_cuda else x


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **how: Any) -> None:
    """In place of a launch of a Triton kernel."""
    from tests.support.gpu_kernels import KERNELS
    from tests.support.recorded_graph import launch

    given = arguments_of_launch(kernel, args, how, grid)
    counted[kernel.__name__] += 1
    launch(KERNELS[kernel.__name__])(**tree_map_only(Tensor, _host, given))


def _use_gloo_as_nccl() -> None:
    """Groups are of gloo. All say that they are of NCCL, but those that a program wants to be of gloo."""
    real_init, real_group, real_barrier = dist.init_process_group, dist.new_group, dist.barrier
    of_host = WeakSet[dist.ProcessGroup]()

    def init(backend: str | None = None, *args: Any, **how: Any) -> None:
        how.pop("device_id", None)
        real_init("gloo", *args, **how)

    def group(*args: Any, backend: str | None = None, **how: Any) -> Any:
        made = real_group(*args, **{**how, "backend": "gloo", "pg_options": None})
        if backend == "gloo" and isinstance(made, dist.ProcessGroup):
            of_host.add(made)
        return made

    def barrier(group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: object = None) -> Any:
        return real_barrier(group, async_op)

    dist.init_process_group, dist.new_group, dist.barrier = init, group, barrier
    dist.get_backend_config = lambda group=None: "cpu:gloo" if group in of_host else "cuda:nccl"
