"""HuggingFace transformers: which attention a model takes, and what mask functions are made of.

transformers tells nobody when a model takes an attention, and has no public name for the one that it has. A mask
function is known by the function of transformers that made it, and its parts by the variables that it closes over.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.masking_utils import or_masks

CHECKED = {"transformers": "5.23"}

set_attn_implementation = PreTrainedModel.set_attn_implementation  # transformers' own


def replace_set_attn_implementation(ours: Callable[..., None]) -> None:
    """Calls `ours` where a model is given an attention; it may call `set_attn_implementation`."""
    PreTrainedModel.set_attn_implementation = ours  # type: ignore[method-assign]


def attention_of(config: Any) -> str:
    """The name of the attention that a model with this config computes."""
    return config._attn_implementation


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether layers of the model hand a state from token to token."""
    return model._is_stateful


def without_documents(mask_function: Callable) -> Callable:
    """The function without the documents that transformers finds in position ids, for a rank has a part of these."""
    parts = _closed_over(mask_function).get("mask_functions", ())
    if mask_function.__qualname__.startswith("or_masks."):
        return or_masks(*map(without_documents, parts))
    for part in parts:
        if part.__qualname__.startswith("remap_positions_for_packed_sequence."):
            return _closed_over(part)["mask_function"]
    return mask_function


def _closed_over(function: Any) -> dict[str, Any]:
    """The variables of the function around it that a function uses."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
