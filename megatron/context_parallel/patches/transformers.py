"""HuggingFace transformers: the attention of a model, and the parts of mask functions.

transformers has no hook for a change of a model's attention, and no public name for the current one. A mask function
is identified by the function that created it, and its parts by the variables of its closure.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.masking_utils import and_masks, or_masks

CHECKED = {"transformers": "5.23 to 5.24"}

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
    made_by = mask_function.__qualname__.partition(".<locals>")[0]
    variables = _closed_over(mask_function)
    if made_by == "remap_positions_for_packed_sequence":
        return variables["mask_function"]
    parts = variables.get("mask_functions", ())
    if made_by == "or_masks":
        return or_masks(*map(without_documents, parts))
    if made_by == "and_masks":
        apart = "packed_sequence_mask_function."
        return and_masks(*(without_documents(part) for part in parts if not part.__qualname__.startswith(apart)))
    return mask_function


def _closed_over(function: Any) -> dict[str, Any]:
    """The closure variables of a function, by name."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
