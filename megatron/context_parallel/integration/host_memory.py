"""Tensors that wait for the backward pass in host memory, and come back ahead of their use."""

import mmap
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol
from weakref import finalize, ref

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.context_parallel.patches.megatron_checkpoint import checkpoints_within

from .kept_outputs import KeptOutputs
from .spec import ContextParallelAttention


class CopyStream(Protocol):
    """Copies between a device and host memory. They run in the order in which they were started."""

    def start(self, to: Tensor, of: Tensor) -> Any:
        """Copy `of` into `to` after what the device was given until now. Returns what `wait` takes."""

    def wait(self, copy: Any) -> None:
        """The device computes nothing further before this copy is done."""


class GPUStream:
    """One side stream, whose copies run beside what the device computes."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def start(self, to: Tensor, of: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)
            done = self._stream.record_event()
        for tensor in (to, of):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return done

    def wait(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(copy)


class CPUStream:
    """Copies at once."""

    def start(self, to: Tensor, of: Tensor) -> None:
        to.copy_(of)

    def wait(self, copy: None) -> None: ...


class HostMemory:
    """A pool of buffers in host memory, and copies from and to the device.

    The buffers are shared memory, which does not count as memory of the process (RLIMIT_DATA). For a GPU they are
    pinned.

    Attributes:
        used: bytes of all buffers, those in the pool included.
        stream: its copies; by default those of this process's device.
    """

    def __init__(self, stream: CopyStream | None = None) -> None:
        self.used = 0
        self.stream: CopyStream = stream or (GPUStream() if torch.cuda.is_available() else CPUStream())
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._layer: _Layer | None = None
        self._before: Callable[[], _Layer | None] = lambda: None

    def take(self, size: int) -> Tensor:
        """A buffer of `size` bytes, uint8."""
        if free := self._free[size]:
            return free.pop()
        self.used += size
        buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if torch.cuda.is_available():
            _pin(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool. The stream orders a copy into it after those out of it."""
        self._free[len(buffer)].append(buffer)

    def put(self, tensor: Tensor) -> "OnHost":
        """Copy a tensor of the device here. It comes back with the others of its layer."""
        saved = OnHost(self, tensor, self._layer)
        if self._layer:
            self._layer.tensors.append(ref(saved))
        return saved

    @contextmanager
    def layer(self, inputs: bool) -> Iterator[None]:
        """Inside, a layer runs forward that will be recomputed. The first of its tensors that is used brings all back.

        It also starts the copies of the layer that ran before it, whose backward pass is the next one.

        Args:
            inputs: autograd saves tensors with gradients here, such as hidden states, and others as ever.
        """
        self._layer = _Layer(self._before)
        hooks = saved_tensors_hooks(
            lambda tensor: self.put(tensor) if tensor.requires_grad else tensor,
            lambda saved: saved.tensor() if isinstance(saved, OnHost) else saved,
        )
        try:
            with hooks if inputs else nullcontext():
                yield
        finally:
            self._before = ref(self._layer)
            self._layer = None


def _pin(buffer: Tensor) -> None:
    """Pins a buffer while it lives. PyTorch's own pinned memory has the next power of two of its bytes."""
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, len(buffer), 1))  # 1: for all devices
    finalize(buffer, cudart.cudaHostUnregister, address)


class _Layer:
    """The tensors of a run of a layer that are in host memory, while they live, and the run before it."""

    def __init__(self, before: Callable[[], "_Layer | None"]) -> None:
        self.before = before
        self.tensors: list[Callable[[], OnHost | None]] = []

    def fetch(self) -> None:
        """Start the copies of all tensors, once."""
        tensors = self.tensors
        self.tensors = []
        for get in tensors:
            if saved := get():
                saved.fetch()


class OnHost:
    """A tensor in host memory. Its buffer returns to the pool with it."""

    def __init__(self, memory: HostMemory, tensor: Tensor, layer: _Layer | None) -> None:
        self._memory, self._device, self._layer = memory, tensor.device, layer
        strides = torch.empty_like(tensor, device="meta").stride()
        self._buffer = memory.take(max(tensor.nbytes, 1))
        self._values = self._buffer[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)
        self._fetched: tuple[Tensor, Any] | None = None
        memory.stream.start(self._values, tensor.detach())

    def fetch(self) -> None:
        """Start the copy to the device that the tensor came from."""
        values = self._values
        back = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=self._device)
        self._fetched = back, self._memory.stream.start(back, values)

    def tensor(self) -> Tensor:
        """A copy on the device, without gradients."""
        if self._layer:
            self._layer.fetch()
        if not self._fetched:
            self.fetch()
        if self._layer and (before := self._layer.before()):
            before.fetch()
        assert self._fetched
        back, copy = self._fetched
        self._fetched = None
        self._memory.stream.wait(copy)
        return back

    def __del__(self) -> None:
        self._memory.give_back(self._buffer)


class HostQueue(deque):
    """A queue of tuples of tensors that are in host memory meanwhile."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory = memory

    def append(self, tensors: tuple[Tensor, ...]) -> None:
        super().append([self._memory.put(tensor) for tensor in tensors])

    def popleft(self) -> tuple[Tensor, ...]:
        return tuple(saved.tensor() for saved in super().popleft())


def offload(model: GPTModel, memory: HostMemory, inputs: bool, kept: bool) -> None:
    """Makes `model` keep tensors of recomputed layers in host memory.

    Args:
        inputs: the inputs of the layers (`--offload-checkpoints`).
        kept: the outputs of modules that are not computed again (`--offload-kept`).
    """
    model.decoder.forward = partial(_offloading, partial(memory.layer, inputs), model.decoder.forward)
    for module in model.modules() if kept else ():
        if isinstance(module, ContextParallelAttention) and module.kept is not None:
            module.kept = HostQueue(memory)
        elif isinstance(module.forward, KeptOutputs):
            module.forward.kept = HostQueue(memory)


def _offloading(layer: Callable, forward: Any, *args: Any, **named: Any) -> Any:
    with checkpoints_within(layer):
        return forward(*args, **named)
