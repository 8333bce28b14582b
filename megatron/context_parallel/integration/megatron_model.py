"""Refuses models of megatron-core in which something else than our attention depends on a rank's tokens."""

import torch
from megatron.core.models.gpt import GPTModel

from megatron.context_parallel.errors import UsageError

from .spec import ContextParallelAttention


def check_shifts(model: GPTModel, n: int) -> None:
    """Refuses multi-token prediction over n > 1 ranks.

    Raises:
        UsageError: megatron-core would shift tokens as they are in its own layout.
    """
    if n > 1 and (given := model.config.mtp_num_layers):
        raise UsageError(
            f"mtp_num_layers {given}: multi-token prediction shifts tokens in megatron-core's own layout; give None"
        )


def check_layers(model: GPTModel, n: int) -> None:
    """Refuses layers over n > 1 ranks that do not have our attention, or a loss that megatron-core weighs by rank.

    From then on the attention takes it that the model follows the layout of the strategy.

    Raises:
        UsageError: the message names the field of the model's config, or the attention.
    """
    if n == 1:
        return
    check_shifts(model, n)
    config = model.config
    if given := getattr(config, "experimental_attention_variant", None):
        raise UsageError(f"experimental_attention_variant {given}: its layers keep their own attention; give None")
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        given = getattr(config, name)
        if any(given) if isinstance(given, list) else given:
            raise UsageError(f"{name} {given}: over {n} ranks megatron-core gives it 1/{n} of its weight; give 0")
    for module in model.modules():
        attention = getattr(module, "core_attention", None)
        if isinstance(attention, torch.nn.Module) and not isinstance(attention, ContextParallelAttention):
            kind = type(attention).__name__
            raise UsageError(f"core_attention {kind}: not replaced; build the model after the replacements")
        if isinstance(attention, ContextParallelAttention):
            attention.follows_layout = True
