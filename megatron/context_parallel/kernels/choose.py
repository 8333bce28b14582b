"""Chooses the kernel for the blocks of a run: the requested one, or the fastest supported one."""

import logging
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.progress import is_first_rank

from .aten import AtenFlash
from .interface import BlockGrad, Kernel, Scores
from .libraries import LIBRARIES, Library
from .libraries.base import length
from .masks import KeyRanges, Piece, PieceMask, cut
from .position import FEW_ROWS, PositionKernel
from .refusals import Need, Place, check, need_of, refuse_block, takes_all_plain
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
    return _kernel(device, need_of(dtype, head_dim, value_dim, softcap), backend)


@cache
def _kernel(device: torch.device, need: Need, backend: str) -> Kernel:
    check(Place.of(device.type), backend, need, masks_known=False)
    kernel, what = _chosen(device, need, backend)
    if is_first_rank():
        logging.getLogger(__name__).info("--cp-attention-backend %s: %s", backend, what)
    return kernel


def _chosen(device: torch.device, need: Need, backend: str) -> tuple[Kernel, str]:
    """A kernel for what `check` has passed, and its description."""
    if backend == "triton":
        return _position(device, need), "the position kernel for all blocks"
    if device.type == "cpu" and need.softcap:
        return SoftcapCpu(), "plain PyTorch in tiles, because its flash attention for CPUs has no softcap"
    if device.type == "cpu":
        return AtenFlash(), "PyTorch's flash attention for CPUs"
    capability = torch.cuda.get_device_capability(device)
    place = Place("cuda", capability)
    if backend != "auto":
        library = LIBRARIES[backend]
        refuse = refuse_block(place, backend, need)
        return library(deterministic=need.deterministic, refuse=refuse), f"{library.title} for all blocks"
    no_position = place.refusal("triton", need)
    names = FASTEST.get(capability[0], OTHERS)
    if no_position:  # libraries for some blocks come last, because nothing computes the other blocks
        names = tuple(sorted(names, key=lambda name: not takes_all_plain(name)))
    passed = ""
    for name in names:
        library = LIBRARIES[name]
        if why := place.refusal(name, need):
            passed += f"; not {name}: {why}"
            continue
        refuse = refuse_block(place, backend, need)
        kernel = library(deterministic=need.deterministic, refuse=refuse)
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
    place = Place.of(device, on_this_host=on_this_host)
    check(place, backend, need_of(dtype, head_dim, value_dim, softcap), irregular, masks_known=True)
