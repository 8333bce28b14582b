"""HuggingFace accelerate: its context parallelism uses PyTorch's implementation, and supports no other."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from accelerate import Accelerator
from torch import nn

CHECKED = {"accelerate": "1.15", "torch": "2.11 to 2.15"}


def prepare_without_its_ring(accelerator: Accelerator) -> None:
    """Makes `accelerator.prepare` leave context parallelism to us. It refuses models with windows for its own ring."""
    accelerator._prepare_cp = _as_they_are  # type: ignore[method-assign]


def _as_they_are(*prepared: object) -> tuple[object, ...]:
    return prepared


def cut_with(accelerator: Accelerator, cut: Callable[..., AbstractContextManager[None]]) -> None:
    """Makes `accelerator.maybe_context_parallel` return `cut`, called with the same arguments by name."""
    accelerator._cp_context = cut


def leave_masks_alone(model: nn.Module) -> None:
    """Removes the hooks with which `prepare` makes every attention causal, even in models that are not causal."""
    for module in model.modules():
        for key, hook in [*module._forward_pre_hooks.items()]:
            if getattr(hook, "__qualname__", "").startswith("_attach_context_parallel_hooks."):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
