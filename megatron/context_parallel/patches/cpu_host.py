"""Makes megatron-core run on a host without a GPU.

megatron-core hard-codes the CUDA device in a few places where the tensor's own device would work. On a host without
a GPU, `support_cpu_host()` redirects those places to the CPU; with a GPU it does nothing. Factory functions are
replaced, not intercepted by a TorchFunctionMode: a mode is suspended inside the backward pass. megatron-core has no
option for it.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.utils._device import _device_constructors

CHECKED = {"torch": "2.11 to 2.15", "megatron-core": "0.16 to 0.19"}

_FACTORIES = ("tensor", "zeros", "ones")
_CUDA_TYPE = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_supported = False


def support_cpu_host() -> None:
    """Prepare this process for megatron-core if it has no GPU. May be called any number of times."""
    global _supported
    if _supported or torch.cuda.is_available():
        return
    _supported = True
    _create_on_cpu()
    _answer_device_questions()
    _work_in_order()
    _keep_tensors_in_place()
    _name_types_as_cuda()
    _share_cpu_generator()
    _count_tokens_of_experts()


def _create_on_cpu() -> None:
    # Schedules, optimizer and gradient clipping create scalars and buffers with device="cuda".
    # `with torch.device(...)` identifies the factories at its first use, and must see the original ones.
    _device_constructors()
    for name in _FACTORIES:
        factory = getattr(torch, name)

        @functools.wraps(factory)
        def on_cpu(*args, _factory=factory, **kwargs):
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return _factory(*args, **kwargs)

        setattr(torch, name, on_cpu)


def _answer_device_questions() -> None:
    # Weights and communication buffers are created on the current device.
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    # Pipeline communication and the checkpoint writer synchronize with the device; a CPU needs no synchronization.
    cuda.synchronize = lambda device=None: None


class _NoStream:
    """Replaces a CUDA stream or event: its work is already complete."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def done(self, *args: object) -> "_NoStream":
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = done


def _work_in_order() -> None:
    # Megatron-FSDP and several instances of the distributed optimizer communicate on separate streams.
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda device=None: _NoStream()
    cuda.stream = contextlib.nullcontext
    cuda.empty_cache = lambda: None


@contextlib.contextmanager
def on_cpu_mesh() -> Iterator[None]:
    """While Megatron-FSDP is built, its device meshes are on the CPU, and the current device has a number."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    class Meshes:
        @staticmethod
        def from_group(group: Any, device_type: str, **how: Any) -> DeviceMesh:
            return DeviceMesh.from_group(group, "cpu", **how)

    log = logging.getLogger("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp")
    cuda: Any = torch.cuda
    before, mcore_fsdp_adapter.DeviceMesh, cuda.current_device = cuda.current_device, Meshes, lambda: 0
    log.addFilter(_no_other_device)
    try:
        yield
    finally:
        mcore_fsdp_adapter.DeviceMesh, cuda.current_device = DeviceMesh, before
        log.removeFilter(_no_other_device)


def _no_other_device(record: logging.LogRecord) -> bool:
    return "instead of the current device" not in record.getMessage()


def _keep_tensors_in_place() -> None:
    # The first and last pipeline stages move the tied embedding to the device.
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def _name_types_as_cuda() -> None:
    # The optimizers sort parameters, and clipping accepts gradients, by these type strings.
    tensor: Any = torch.Tensor
    of_tensor = tensor.type

    @functools.wraps(of_tensor)
    def name_or_cast(self, dtype=None, **kwargs):
        if dtype is None and self.dtype in _CUDA_TYPE:
            return _CUDA_TYPE[self.dtype]
        return of_tensor(self, dtype, **kwargs)

    tensor.type = name_or_cast


def _share_cpu_generator() -> None:
    # The tensor-parallel RNG tracker and recomputation save, seed and restore the device's generator.
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # The tracker warns if the CPU generator advances inside its fork. On a CPU it must.
    logging.getLogger(random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())


def _count_tokens_of_experts() -> None:
    # Counts are passed to torch.distributed as arrays; megatron-core converts only those from a GPU.
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts

    token_dispatcher.maybe_move_tensor_to_cpu = on_host
