"""Context-parallel attention for Megatron: strategies as plans, one executor for all of them."""

from .attention import context_parallel_attention
from .context import AllRanks, ContextParallel
from .errors import UsageError
from .layout import LAYOUTS
from .strategies import STRATEGIES

__version__ = "0.1.0"
__all__ = ["LAYOUTS", "STRATEGIES", "AllRanks", "ContextParallel", "UsageError", "context_parallel_attention"]
