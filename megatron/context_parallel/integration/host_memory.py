"""Tensors that wait for the backward pass in host memory."""

import mmap
from collections import defaultdict, deque
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.context_parallel.patches.megatron_checkpoint import checkpoints_within

from .kept_outputs import KeptOutputs
from .spec import ContextParallelAttention


class HostMemory:
    """A pool of buffers in host memory, and copies from and to the device.

    For a GPU the buffers are pinned, and one side stream copies into them. On a CPU they are shared memory, which does
    not count as memory of the process (RLIMIT_DATA), like host memory beside a GPU.

    Attributes:
        used: bytes of all buffers, those in the pool included.
    """

    def __init__(self) -> None:
        self.used = 0
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def take(self, size: int) -> Tensor:
        """A buffer of `size` bytes, uint8."""
        if free := self._free[size]:
            return free.pop()
        self.used += size
        if self._stream:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool. The side stream orders a copy into it after those out of it."""
        self._free[len(buffer)].append(buffer)

    def copy_in(self, to: Tensor, tensor: Tensor) -> None:
        """Copy a tensor of the device into a part of a buffer, beside what the device computes."""
        if not self._stream:
            to.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)

    def copy_out(self, of: Tensor, device: torch.device) -> Tensor:
        """A copy on the device, after all copies into buffers."""
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)
        return of.to(device, non_blocking=True, copy=True)

    def saves_inputs(self) -> AbstractContextManager:
        """Inside, autograd saves tensors with gradients here, such as hidden states, and others as ever."""
        return saved_tensors_hooks(
            lambda tensor: OnHost(self, tensor) if tensor.requires_grad else tensor,
            lambda saved: saved.tensor() if isinstance(saved, OnHost) else saved,
        )


class OnHost:
    """A tensor in host memory. Its buffer returns to the pool with it."""

    def __init__(self, memory: HostMemory, tensor: Tensor) -> None:
        self._memory, self._device = memory, tensor.device
        strides = torch.empty_like(tensor, device="meta").stride()
        self._buffer = memory.take(max(tensor.nbytes, 1))
        self._values = self._buffer[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)
        memory.copy_in(self._values, tensor.detach())

    def tensor(self) -> Tensor:
        """A copy on the device that it came from, without gradients."""
        return self._memory.copy_out(self._values, self._device)

    def __del__(self) -> None:
        self._memory.give_back(self._buffer)


class HostQueue(deque):
    """A queue of tuples of tensors that are in host memory meanwhile."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory = memory

    def append(self, tensors: tuple[Tensor, ...]) -> None:
        super().append([OnHost(self._memory, tensor) for tensor in tensors])

    def popleft(self) -> tuple[Tensor, ...]:
        return tuple(saved.tensor() for saved in super().popleft())


def offload_checkpoints(model: GPTModel, memory: HostMemory) -> None:
    """Makes `model` save the inputs of recomputed layers in host memory (`--offload-checkpoints`)."""
    model.decoder.forward = partial(_saving_inputs, memory, model.decoder.forward)


def _saving_inputs(memory: HostMemory, forward: Any, *args: Any, **named: Any) -> Any:
    with checkpoints_within(memory.saves_inputs):
        return forward(*args, **named)


def offload_kept(model: GPTModel, memory: HostMemory) -> None:
    """Makes `model` keep results of modules for recomputation in host memory (`--offload-kept`)."""
    for module in model.modules():
        if isinstance(module, ContextParallelAttention) and module.kept is not None:
            module.kept = HostQueue(memory)
        elif isinstance(module.forward, KeptOutputs):
            module.forward.kept = HostQueue(memory)
