"""megatron-core's experts without Transformer Engine: they compare a name with None that is then undefined."""

from typing import Any

from megatron.core.transformer.moe import moe_utils

CHECKED = {"megatron-core": "0.16"}


def say_there_is_no_gemm() -> None:
    """Defines `te_general_gemm` as None if Transformer Engine has not defined it."""
    module: Any = moe_utils
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
