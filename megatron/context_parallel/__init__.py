"""Context-parallel attention for Megatron: strategies as plans, one executor for all of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.context_parallel.attention.api import context_parallel_attention
    from megatron.context_parallel.attention.context import AllRanks, ContextParallel
    from megatron.context_parallel.errors import UsageError
    from megatron.context_parallel.strategies import STRATEGIES
    from megatron.context_parallel.tokens.layout import LAYOUTS

__version__ = "0.1.0"
__all__ = ["LAYOUTS", "STRATEGIES", "AllRanks", "ContextParallel", "UsageError", "context_parallel_attention"]
_MODULES = {
    "AllRanks": "attention.context",
    "ContextParallel": "attention.context",
    "LAYOUTS": "tokens.layout",
    "STRATEGIES": "strategies",
    "UsageError": "errors",
    "context_parallel_attention": "attention.api",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that `--help` and invalid flags do not wait for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
