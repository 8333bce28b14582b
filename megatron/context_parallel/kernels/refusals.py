"""Why a backend cannot compute something, and what to give instead. What is advised works."""

import os
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch

from megatron.context_parallel.errors import UsageError

from . import position
from .libraries import LIBRARIES, Capability, Library
from .libraries.base import RefuseBlock
from .names import BACKENDS
from .position import PARTS

MASKS = "windows and packed documents"  # what makes blocks that are neither full nor causal
_ORDER = ("triton", *LIBRARIES)  # in which one is advised for blocks that another one lacks


class Need(NamedTuple):
    """The device, dtype, sizes and masks of the blocks."""

    dtype: torch.dtype
    head_dim: int  # of queries and keys
    value_dim: int
    softcap: float
    deterministic: bool
    only_warn: bool = False  # PyTorch's deterministic mode has warn_only=True


def need_of(dtype: torch.dtype, head_dim: int, value_dim: int | None, softcap: float) -> Need:
    """The need of a call in PyTorch's deterministic mode as it is now; `value_dim` None: that of keys."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    return Need(dtype, head_dim, value_dim or head_dim, softcap, deterministic, only_warn)


class Place(NamedTuple):
    """Where blocks are computed. `capability`: of the GPU; None: on any GPU with any library, or on a CPU."""

    device: str
    capability: Capability | None

    @classmethod
    def of(cls, device: str, *, on_this_host: bool = True) -> "Place":
        """A device of this host or of any."""
        on_gpu = on_this_host and device == "cuda"
        return cls(device, torch.cuda.get_device_capability() if on_gpu else None)

    def refusal(self, backend: str, need: Need, irregular: str | None = None) -> str | None:
        """Why a backend cannot compute this there, or None."""
        if backend == "auto":
            by_one = [self.refusal(name, need, irregular) for name in BACKENDS[1:]]
            return None if None in by_one else self.refusal("triton", need, irregular)
        if self.device == "cpu":
            return _refusal_on_cpu(backend)
        if irregular and backend in LIBRARIES:
            return f"{LIBRARIES[backend].title} has no mask for {irregular}"
        return _refusal(backend, need, self.capability)


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


# ------------------------------------------------------------------------------------------------ the advice


def check(place: Place, backend: str, need: Need, irregular: str | None = None, *, masks_known: bool) -> None:
    """Raises the UsageError of a backend that cannot compute this, as in `check_backend`.

    If the masks are not known yet, it advises what computes all of them, where there is such a backend.
    """
    if backend not in BACKENDS:
        raise UsageError(f"--cp-attention-backend {backend}: unknown; choose one of {', '.join(BACKENDS)}")
    if why := place.refusal(backend, need, irregular):
        able = "auto" if not masks_known and not place.refusal("triton", need) else None
        instead = f"give --cp-attention-backend {able}" if able else remedy(place, backend, need, irregular)
        raise UsageError(f"--cp-attention-backend {backend}: {why}; {instead}")


def remedy(place: Place, backend: str, need: Need, irregular: str | None) -> str:
    """What to give instead: a backend that can compute it, or the fewest changes with which one can."""
    if able := _first_able(place, BACKENDS[1:], need, irregular):
        return f"give {able}"
    changes = _changes(need, irregular)
    for count in range(1, len(changes) + 1):
        for some in combinations(changes, count):
            changed, mask = need, irregular
            for change in some:
                changed = changed._replace(**change.sizes)
                mask = None if change.plain_masks else mask
            if not place.refusal(backend, changed, mask):
                return " and ".join(change.text for change in some)
            if able := _first_able(place, BACKENDS[1:], changed, mask):
                return " and ".join([*(change.text for change in some), f"give {able}"])
    return "no backend runs on this GPU; use one of compute capability 8.0 or newer"


def _first_able(place: Place, names: Sequence[str], need: Need, irregular: str | None) -> str | None:
    able = next((name for name in names if not place.refusal(name, need, irregular)), None)
    return able and f"--cp-attention-backend {able}"


class _Change(NamedTuple):
    """Something to change, in words; `sizes` of `Need` that it sets, and whether masks are full and causal then."""

    text: str
    sizes: dict[str, Any]
    plain_masks: bool = False


def _changes(need: Need, irregular: str | None) -> list[_Change]:
    """What can be changed if no backend can compute it, the most likely first."""
    dim, value = need.head_dim, need.value_dim
    widths, changes = [], []
    for size in dict.fromkeys([_fitting(dim), 128]):
        sizes = {"head_dim": size} | ({"value_dim": size} if value == dim else {})
        widths.append(_Change(f"give --kv-channels {size}", sizes))
    changes += widths if dim not in PARTS else []
    for size in dict.fromkeys([_fitting(value), dim, _fitting(dim), 128]) if value != dim else ():
        changes.append(_Change(f"give values of head_dim {size}", {"value_dim": size}))
    if irregular:
        changes.append(_Change(f"leave out {irregular}", {}, plain_masks=True))
    if need.softcap:
        changes.append(_Change("give softcap 0", {"softcap": 0.0}))
    if need.dtype not in (torch.float16, torch.bfloat16):
        changes.append(_Change("give --bf16", {"dtype": torch.bfloat16}))
    if need.deterministic:
        changes.append(_Change("turn torch.use_deterministic_algorithms off", {"deterministic": False}))
    return changes if dim not in PARTS else changes + widths


def _fitting(size: int) -> int:
    return min((d for d in PARTS if d >= size), default=max(PARTS))


def refusal_of_blocks(
    backend: str, dtype: torch.dtype, head_dim: int, *, on_this_host: bool = True, value_dim: int | None = None
) -> RefuseBlock:
    """What makes the error for a block that a library on a GPU does not compute. Arguments as in `check_backend`."""
    return refuse_block(Place.of("cuda", on_this_host=on_this_host), backend, need_of(dtype, head_dim, value_dim, 0.0))


def refuse_block(place: Place, backend: str, need: Need) -> RefuseBlock:
    """The same for a known need; `backend` is what the user gave."""

    def refuse(why: str, irregular: bool) -> UsageError:
        mask = MASKS if irregular else None
        able = _first_able(place, [name for name in _ORDER if takes_all_plain(name)], need, mask)
        instead = f"give {able}" if able else remedy(place, backend, need, mask)
        return UsageError(f"--cp-attention-backend {backend}: {why}; {instead}")

    return refuse


def takes_all_plain(name: str) -> bool:
    """Whether a backend computes all full and causal blocks."""
    return name not in LIBRARIES or LIBRARIES[name].blocks == Library.blocks
