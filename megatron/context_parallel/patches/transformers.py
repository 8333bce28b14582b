"""HuggingFace transformers: the attention of a model, and the parts of mask functions.

transformers has no hook for a change of a model's attention, and no public name for the current one. A mask function
is identified by the function that created it, and its parts by the variables of its closure.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.masking_utils import or_masks

CHECKED = {"transformers": "5.23"}

set_attn_implementation = PreTrainedModel.set_attn_implementation  # transformers' own


def replace_set_attn_implementation(ours: Callable[..., None]) -> None:
    """Calls `ours` when the attention of a model is set. It may call `set_attn_implementation`."""
    PreTrainedModel.set_attn_implementation = ours  # type: ignore[method-assign]


def attention_of(config: Any) -> str:
    """The name of the attention that a model with this config computes."""
    return config._attn_implementation


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether layers of the model pass a state from token to token."""
    return model._is_stateful


def without_documents(mask_function: Callable) -> Callable:
    """The function without the documents from position ids, because a rank has only a part of these."""
    parts = _closed_over(mask_function).get("mask_functions", ())
    if mask_function.__qualname__.startswith("or_masks."):
        return or_masks(*map(without_documents, parts))
    for part in parts:
        if part.__qualname__.startswith("remap_positions_for_packed_sequence."):
            return _closed_over(part)["mask_function"]
    return mask_function


def _closed_over(function: Any) -> dict[str, Any]:
    """The closure variables of a function, by name."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
