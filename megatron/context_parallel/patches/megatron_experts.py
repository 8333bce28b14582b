"""Differences between releases of megatron-core's experts, and a name that they need without Transformer Engine.

They compare that name with None, though it is undefined then. No public name tells how a release weights losses, or
gives the parts of a layer.
"""

from typing import Any

import megatron.core
from megatron.core.transformer.moe import moe_utils

from . import release_of

CHECKED = {"megatron-core": "0.16 to 0.19"}

# Until 0.18 a rank's part of the load balancing loss has the weight of its own tokens; from 0.19 on, of all ranks'.
WEIGHED_BY_OWN_TOKENS = release_of(megatron.core.__version__) < (0, 19)


def say_there_is_no_gemm() -> None:
    """Defines `te_general_gemm` as None if Transformer Engine has not defined it."""
    module: Any = moe_utils
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def parts_of_mlp(mlp: Any) -> Any:
    """The submodules in the spec of a layer's MLP or experts: a ModuleSpec until 0.17, a partial from 0.18 on."""
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
