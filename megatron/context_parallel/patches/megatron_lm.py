"""What an unmodified Megatron-LM, or Megatron-Bridge, calls of megatron-core for attention and to cut a sequence.

Megatron's scripts build their models and batches by these names alone, and take no functions of ours.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

CHECKED = {"megatron-core": "0.16 to 0.19"}

_PACKED = ("get_thd_batch_on_this_cp_rank", "get_batch_on_this_hybrid_cp_rank", "get_sft_batch_on_this_cp_rank")


def replaced_by(
    *, core_attention: Callable, batch: Callable, packed_batch: Callable, embedding: Callable
) -> Iterator[tuple[Any, str, Callable]]:
    """(owner, name, value) of all that is replaced.

    Args:
        core_attention: in place of the method of the providers of layer specs.
        batch: in place of the function that cuts a batch.
        packed_batch: in place of those that cut packed sequences.
        embedding: in place of the function that cuts a table of rotations.
    """
    from megatron.core import utils
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding

    for provider in (LocalSpecProvider, TESpecProvider):
        yield provider, "core_attention", core_attention
    yield utils, "get_batch_on_this_cp_rank", batch
    for name in _PACKED:
        if hasattr(utils, name):  # no release has all of them
            yield utils, name, packed_batch
    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        yield module, "get_pos_emb_on_this_cp_rank", embedding


def put_in_place(replacements: Iterable[tuple[Any, str, Callable]]) -> None:
    """Replaces each of (owner, name, value)."""
    for owner, name, value in replacements:
        setattr(owner, name, value)
