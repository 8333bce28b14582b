"""Which kernel computes the blocks of a run: what was asked for, or the fastest that can, and why."""

import importlib.util
import logging
import os
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends import BACKENDS
from ..errors import UsageError
from . import BlockGrad, Kernel, Scores
from .aten import AtenFlash
from .libraries import LIBRARIES, Capability
from .masks import Piece, PieceMask, Runs, cut
from .position import PARTS, PositionKernel, architecture
from .position.tiles import TILES
from .softcap import SoftcapCpu

MOST_PIECES = 3  # of a block that is still cut for a library: a zigzag block against its own chunk
SHORTEST = 16  # rows or keys of a piece that is worth a library's launch

# Fastest first. flash-attn 3 is written for Hopper's tensor cores and cuDNN comes next there; on Blackwell cuDNN is
# tuned and stable where flash-attn 4 is a beta; the older kernels use instructions of Ampere. Transformer Engine is
# cuDNN behind more host work, so it is used where it is asked for.
FASTEST: dict[int, tuple[str, ...]] = {
    8: ("flash2", "aten", "cudnn"),
    9: ("flash3", "cudnn", "flash4", "flash2", "aten"),
    10: ("cudnn", "flash4", "flash2", "aten"),
}
OTHERS = ("aten", "cudnn")  # on GPUs not in the table


class _Named(Kernel, Protocol):
    name: str


class LibraryAndPosition:
    """`kernels.Kernel`: full and causal pieces by a library; a block that does not come apart into a few by the
    position kernel, in one launch."""

    def __init__(self, library: _Named, position: _Named) -> None:
        self.plain, self.position = library, position
        self.name = f"{library.name}+{position.name}"

    def pieces(self, block: Runs, keys: int) -> list[Piece]:
        found = cut(block)
        if len(found) > MOST_PIECES or not all(_worth_a_launch(p) for p in found):
            return self.position.pieces(block, keys)
        return found

    def _for(self, mask: PieceMask) -> Kernel:
        return self.position if isinstance(mask, Runs) else self.plain

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        return self._for(mask).forward(q, k, v, mask, scores)

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        return self._for(grad.mask).backward(grad, scores)


def _worth_a_launch(piece: Piece) -> bool:
    """Not with runs, not tiny, and no step of a staircase, which the position kernel does in one launch."""
    staircase = (piece.kv.step or 1) > 1
    return not (isinstance(piece.mask, Runs) or staircase) and min(map(_count, (piece.q, piece.kv))) >= SHORTEST


def _count(rows: slice) -> int:
    return len(range(rows.start, rows.stop))


class Need(NamedTuple):
    """What blocks are made of."""

    dtype: torch.dtype
    head_dim: int  # of queries and keys
    value_dim: int
    softcap: float


@cache
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

    Args:
        device: where the blocks are; dtype: of queries, keys and values.
        head_dim: of queries and keys; value_dim: of values, None for the same.
        softcap: as in `Scores`.

    Raises:
        UsageError: a backend that cannot; the message names one that can.
    """
    check_backend(backend, dtype, head_dim, device=device.type, value_dim=value_dim, softcap=softcap)
    kernel, what = _chosen(device, Need(dtype, head_dim, value_dim or head_dim, softcap), backend)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(__name__).info("--cp-attention-backend %s: %s", backend, what)
    return kernel


def _chosen(device: torch.device, need: Need, backend: str) -> tuple[Kernel, str]:
    """A kernel that `check_backend` lets pass, and what it is."""
    if backend == "triton":
        return _position(device), "the position kernel for all blocks"
    if device.type == "cpu" and need.softcap:
        return SoftcapCpu(), "plain PyTorch by tiles, as its flash attention for CPUs has no softcap"
    if device.type == "cpu":
        return AtenFlash(), "PyTorch's flash attention for CPUs"
    if backend != "auto":
        return LIBRARIES[backend](), f"{LIBRARIES[backend].title} for all blocks"
    capability = torch.cuda.get_device_capability(device)
    no_position = _refusal("triton", need, capability)
    passed = ""
    for name in FASTEST.get(capability[0], OTHERS):
        library = LIBRARIES[name]
        if why := _refusal(name, need, capability):
            passed += f"; not {name}: {why}"
        elif no_position:
            return library(), f"{library.title} for full and causal blocks{passed}; others refused: {no_position}"
        else:
            both = LibraryAndPosition(library(), _position(device))
            return both, f"{library.title} for full and causal blocks{passed}; the position kernel for others"
    return _position(device), f"the position kernel for all blocks{passed}"


def _position(device: torch.device) -> _Named:
    return PositionKernel(device, deterministic=torch.are_deterministic_algorithms_enabled())


def check_backend(
    backend: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    device: str,
    irregular: str | None = None,
    here: bool = True,
    value_dim: int | None = None,
    softcap: float = 0.0,
) -> None:
    """Refuse a `--cp-attention-backend` that cannot do what a run needs, before it starts.

    Args:
        device: "cuda" or "cpu", where the run computes.
        irregular: the flag that needs masks which are neither full nor causal, such as "--window-size"; None without.
        here: the run computes on this host, so that what is installed, and the GPU, count. Otherwise what is known of
            the backends everywhere does.
        value_dim, softcap: as in `kernel_for`.

    Raises:
        UsageError: names a backend that can.
    """
    if backend not in BACKENDS:
        raise UsageError(f"--cp-attention-backend {backend}: unknown; choose one of {', '.join(BACKENDS)}")
    need = Need(dtype, head_dim, value_dim or head_dim, softcap)
    capability = torch.cuda.get_device_capability() if here and device == "cuda" else None

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
    """What to change where no backend can."""
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
    """Why a backend cannot compute this on a GPU of that capability (None: on any, wherever it is installed)."""
    if name == "triton":
        return _refusal_of_position(need, capability)
    library, dtype, head_dim = LIBRARIES[name], need.dtype, need.head_dim
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{library.title} has no {str(dtype).removeprefix('torch.')}"
    if head_dim % 8:
        return f"{library.title} needs head_dim to be a multiple of 8, not {head_dim}"
    if why := library.lacks(head_dim, need.value_dim, need.softcap):
        return why
    if capability is None:
        return None if head_dim <= 256 else f"{library.title} has no head_dim {head_dim}"
    largest = library.largest_head(capability)
    if head_dim > largest:
        sm = "sm_{}{}".format(*capability)
        return f"{library.title} does not run on {sm}" if not largest else f"head_dim is {largest} at most on {sm}"
    return library.missing()


def _refusal_of_position(need: Need, capability: Capability | None) -> str | None:
    if need.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the position kernel has no {str(need.dtype).removeprefix('torch.')}"
    if lacking := [d for d in (need.head_dim, need.value_dim) if d not in PARTS]:
        return f"the position kernel has head_dim {', '.join(map(str, PARTS))}, not {lacking[0]}"
    if capability is not None and architecture(capability) not in TILES:
        return "the position kernel does not run on sm_{}{}".format(*capability)
    if capability is not None and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None
