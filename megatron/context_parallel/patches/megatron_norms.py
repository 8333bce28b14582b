"""Recomputation of norms in megatron-core (`--recompute-modules layernorm`) without Transformer Engine.

Its `CheckpointWithoutOutput` uses Transformer Engine's FP8 recipes unless `fp8` is None. But the default of `fp8` is
False, and layers do not give it. It has no option for it.
"""

from typing import Any

from megatron.core.tensor_parallel.random import HAVE_TE, CheckpointWithoutOutput

CHECKED = {"megatron-core": "0.16 to 0.19"}


def recompute_without_fp8() -> None:
    """Makes None the default of `fp8` if Transformer Engine is not installed. May be called any number of times."""
    init: Any = CheckpointWithoutOutput.__init__
    if not HAVE_TE:
        init.__defaults__ = (None, *init.__defaults__[1:])
