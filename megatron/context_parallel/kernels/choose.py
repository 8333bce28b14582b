"""Chooses the kernel for the blocks of a run: the requested one, or the fastest supported one."""

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.progress import is_first_rank

from . import position
from .aten import AtenFlash
from .interface import BlockGrad, Kernel, Scores
from .libraries import LIBRARIES, Capability, Library
from .libraries.base import length
from .masks import KeyRanges, Piece, PieceMask, cut
from .names import BACKENDS
from .position import FEW_ROWS, PARTS, PositionKernel
from .softcap import SoftcapCpu

MOST_PIECES = 3  # the most pieces of a block for a library: those of a zigzag block against its own chunk
SHORTEST = FEW_ROWS  # the fewest rows or keys of a piece for a library: the position kernel splits keys for fewer rows

# Fastest first. flash-attn 3 is written for Hopper's tensor cores, and cuDNN comes next there. On Blackwell, cuDNN is
# tuned and stable, and flash-attn 4 is a beta. The older kernels use instructions of Ampere.
FASTEST: dict[int, tuple[str, ...]] = {
    8: ("flash2", "aten"),
    9: ("flash3", "cudnn", "flash4", "flash2", "aten"),
    10: ("cudnn", "flash4", "flash2", "aten"),
}
OTHERS = ("aten",)  # on GPUs not in the table


class _Named(Kernel, Protocol):
    name: str


class LibraryAndPosition:
    """`kernels.Kernel`: a library computes full and causal pieces. The position kernel computes, in one launch, each
    block that cannot be split into a few pieces for the library."""

    def __init__(self, library: Library, position: _Named) -> None:
        self.plain, self.position = library, position
        self.name = f"{library.name}+{position.name}"

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        found = cut(block, most=MOST_PIECES + 1)
        rows = block.first.shape[1]
        if len(found) <= MOST_PIECES and all(_worth_a_launch(p) and self.plain.takes(p, rows, keys) for p in found):
            return found
        return self.position.pieces(block, keys)

    def _for(self, mask: PieceMask, q: Tensor, k: Tensor) -> Kernel:
        """Decoding and measurements compute blocks that `pieces` did not cut."""
        if isinstance(mask, KeyRanges):
            return self.position
        rows, keys = len(q), len(k)
        whole = Piece(slice(0, rows), slice(0, keys), mask)
        return self.plain if _worth_a_launch(whole) and self.plain.takes(whole, rows, keys) else self.position

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        return self._for(mask, q, k).forward(q, k, v, mask, scores)

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        return self._for(grad.mask, grad.q, grad.k).backward(grad, scores)


def _worth_a_launch(piece: Piece) -> bool:
    """Whether it is not tiny and not a step of a staircase, which the position kernel computes in one launch."""
    return (piece.kv.step or 1) == 1 and min(map(length, (piece.q, piece.kv))) >= SHORTEST


class Need(NamedTuple):
    """The device, dtype, sizes and masks of the blocks."""

    dtype: torch.dtype
    head_dim: int  # of queries and keys
    value_dim: int
    softcap: float
    deterministic: bool
    only_warn: bool = False  # PyTorch's deterministic mode has warn_only=True


def _need(dtype: torch.dtype, head_dim: int, value_dim: int | None, softcap: float) -> Need:
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    return Need(dtype, head_dim, value_dim or head_dim, softcap, deterministic, only_warn)


def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    backend: str = "auto",
    *,
    value_dim: int | None = None,
    softcap: float = 0.0,
) -> Kernel:
    """The kernel of `--cp-attention-backend`; the choice and its reason are logged, once and on rank 0.

    Under `torch.use_deterministic_algorithms(True)` its gradients are the same bit for bit each time.

    Args:
        device: where the blocks are; dtype: of queries, keys and values.
        head_dim: of queries and keys; value_dim: of values, None for the same.
        softcap: as in `Scores`.

    Raises:
        UsageError: the backend cannot compute them; the message names one that can.
    """
    return _kernel(device, _need(dtype, head_dim, value_dim, softcap), backend)


@cache
def _kernel(device: torch.device, need: Need, backend: str) -> Kernel:
    check_backend(
        backend, need.dtype, need.head_dim, device=device.type, value_dim=need.value_dim, softcap=need.softcap
    )
    kernel, what = _chosen(device, need, backend)
    if is_first_rank():
        logging.getLogger(__name__).info("--cp-attention-backend %s: %s", backend, what)
    return kernel


def _chosen(device: torch.device, need: Need, backend: str) -> tuple[Kernel, str]:
    """A kernel for what `check_backend` has passed, and its description."""
    if backend == "triton":
        return _position(device, need), "the position kernel for all blocks"
    if device.type == "cpu" and need.softcap:
        return SoftcapCpu(), "plain PyTorch in tiles, because its flash attention for CPUs has no softcap"
    if device.type == "cpu":
        return AtenFlash(), "PyTorch's flash attention for CPUs"
    if backend != "auto":
        library = LIBRARIES[backend]
        return library(deterministic=need.deterministic), f"{library.title} for all blocks"
    capability = torch.cuda.get_device_capability(device)
    no_position = _refusal("triton", need, capability)
    names = FASTEST.get(capability[0], OTHERS)
    if no_position:  # libraries for some blocks come last, because nothing computes the other blocks
        names = tuple(sorted(names, key=lambda name: LIBRARIES[name].blocks != Library.blocks))
    passed = ""
    for name in names:
        library = LIBRARIES[name]
        if why := _refusal(name, need, capability):
            passed += f"; not {name}: {why}"
            continue
        kernel = library(deterministic=need.deterministic)
        served = f"{library.title} for {library.blocks}{passed}"
        if no_position:
            return kernel, f"{served}; other blocks are not supported: {no_position}"
        return LibraryAndPosition(kernel, _position(device, need)), f"{served}; the position kernel for other blocks"
    return _position(device, need), f"the position kernel for all blocks{passed}"


def _position(device: torch.device, need: Need) -> _Named:
    return PositionKernel(device, deterministic=need.deterministic)


def check_backend(
    backend: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    device: str,
    irregular: str | None = None,
    on_this_host: bool = True,
    value_dim: int | None = None,
    softcap: float = 0.0,
) -> None:
    """Reject a `--cp-attention-backend` that cannot compute the attention of a run, before it starts.

    Args:
        device: "cuda" or "cpu", where the run computes.
        irregular: the flag that needs masks which are neither full nor causal, such as "--window-size"; None if none.
        on_this_host: whether the run computes on this host: then installed packages and the GPU are checked too.
            Otherwise only limits that hold on every host are.
        value_dim, softcap: as in `kernel_for`.

    Raises:
        UsageError: it cannot; the message names a backend that can.
    """
    if backend not in BACKENDS:
        raise UsageError(f"--cp-attention-backend {backend}: unknown; choose one of {', '.join(BACKENDS)}")
    need = _need(dtype, head_dim, value_dim, softcap)
    capability = torch.cuda.get_device_capability() if on_this_host and device == "cuda" else None

    def refusal(name: str) -> str | None:
        if device == "cpu":
            return _refusal_on_cpu(name)
        if irregular and name in LIBRARIES:
            return f"{LIBRARIES[name].title} has no mask for {irregular}"
        return _refusal(name, need, capability)

    if backend == "auto":
        why = None if any(not refusal(name) for name in BACKENDS[1:]) else refusal("triton")
    else:
        why = refusal(backend)
    if why:
        able = next((name for name in BACKENDS[1:] if not refusal(name)), None)
        remedy = f"give --cp-attention-backend {able}" if able else _advice(need, irregular)
        raise UsageError(f"--cp-attention-backend {backend}: {why}; {remedy}")


def _advice(need: Need, irregular: str | None) -> str:
    """What to change if no backend can compute it."""
    if need.head_dim not in PARTS:
        return f"give --kv-channels {_fitting(need.head_dim)}"
    if need.value_dim not in PARTS:
        return f"give values of head_dim {_fitting(need.value_dim)}"
    if irregular:
        return f"leave out {irregular}"
    if need.softcap:
        return "give softcap 0"
    if need.value_dim != need.head_dim:
        return f"give values of head_dim {need.head_dim}"
    return "give --bf16" if need.dtype is torch.float32 else "give --kv-channels 128"


def _fitting(size: int) -> int:
    return min((d for d in PARTS if d >= size), default=max(PARTS))


def _refusal_on_cpu(name: str) -> str | None:
    if name == "aten" or (name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return "this host has no GPU"


def _refusal(name: str, need: Need, capability: Capability | None) -> str | None:
    """Why a backend cannot compute this on a GPU of that capability (None: on any GPU, on any host)."""
    if name == "triton":
        return position.refusal(need.dtype, (need.head_dim, need.value_dim), capability)
    library = LIBRARIES[name]
    dtype = need.dtype
    head_dim = need.head_dim
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{library.title} does not support {str(dtype).removeprefix('torch.')}"
    if head_dim % 8:
        return f"{library.title} needs head_dim to be a multiple of 8, not {head_dim}"
    if why := library.lacks(head_dim, need.value_dim, need.softcap):
        return why
    if library.strict_only and need.deterministic and need.only_warn:
        return f"{library.title} is not deterministic with torch.use_deterministic_algorithms(warn_only=True)"
    if capability is None:
        return None if head_dim <= 256 else f"{library.title} does not support head_dim {head_dim}"
    if head_dim not in library.head_dims(capability, deterministic=need.deterministic):
        return _refusal_of_size(library, need, capability)
    return library.missing(head_dim)


def _refusal_of_size(library: type[Library], need: Need, capability: Capability) -> str:
    on = "on sm_{}{}".format(*capability)
    if not (ever := library.head_dims(capability, deterministic=False)):
        return f"{library.title} does not run {on}"
    if need.head_dim not in ever:
        return f"{library.title} {on} supports head_dim {_sizes(ever)}, not {need.head_dim}"
    return f"{library.title} has no deterministic gradients for head_dim {need.head_dim} {on}"


def _sizes(multiples: Sequence[int]) -> str:
    """Head_dims in words: those in steps of 8 by their largest, the others after it."""
    steady = [d for d in multiples if d - 8 in (0, *multiples)]
    return " or ".join([f"{steady[-1]} at most", *(str(d) for d in multiples if d not in steady)])
