"""megatron-core's functions with which Megatron-LM and Megatron-Bridge build attention and shard sequences.

Megatron's scripts call these names directly, and cannot be configured to call other functions.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

CHECKED = {"megatron-core": "0.16 to 0.19"}


def replaced_by(
    *,
    core_attention: Callable,
    batch: Callable,
    packed_batch: Callable,
    hybrid_batch: Callable,
    embedding: Callable,
    call: Callable[[Callable], Callable],
) -> Iterator[tuple[Any, str, Callable]]:
    """(owner, name, value) of each replacement.

    Args:
        core_attention: replaces the method of the providers of layer specs.
        batch: replaces the function that shards a batch, and the one for packed sequences of megatron-core 0.18.
        packed_batch: replaces the function that shards packed sequences, until megatron-core 0.17.
        hybrid_batch: replaces the function that shards hybrid batches, until megatron-core 0.17.
        embedding: replaces the function that shards a table of rotations.
        call: makes the replacement of the model's `forward` from it.
    """
    from megatron.core import utils
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.models.gpt import GPTModel

    for provider in (LocalSpecProvider, TESpecProvider):
        yield provider, "core_attention", core_attention
    yield utils, "get_batch_on_this_cp_rank", batch
    if hasattr(utils, "get_sft_batch_on_this_cp_rank"):
        yield utils, "get_sft_batch_on_this_cp_rank", batch
    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):
        yield utils, "get_thd_batch_on_this_cp_rank", packed_batch
        yield utils, "get_batch_on_this_hybrid_cp_rank", hybrid_batch
    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        yield module, "get_pos_emb_on_this_cp_rank", embedding
    yield GPTModel, "forward", call(GPTModel.forward)


def put_in_place(replacements: Iterable[tuple[Any, str, Callable]]) -> None:
    """Replaces each of (owner, name, value)."""
    for owner, name, value in replacements:
        setattr(owner, name, value)
