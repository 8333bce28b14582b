"""Rotary embeddings for the positions of a rank in any layout. megatron-core's own assumes the zigzag layout."""

from functools import cache
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.patches.megatron_rope import share_cos_and_sin
from megatron.context_parallel.tokens.documents import Documents, placement_of

from .megatron_model import check_shifts
from .model_config import ModelConfig
from .packed import PackedDocuments, accept_thd
from .spec import ContextParallelAttention

_CALL = ("input_ids", "position_ids", "attention_mask", "decoder_input", "labels")  # of GPTModel, in this order


class LayoutRotaryEmbedding(torch.nn.Module):
    """Replaces a model's rotary embedding: the same table, in the order of this rank's tokens.

    Args:
        table: the rotary embedding of megatron-core.
        of_windows: that of the layers with a window, if they have another. Angles then have twice the width.

    Attributes:
        documents: those of the current batch, if it brings its own placement.
    """

    def __init__(self, table: RotaryEmbedding, cp: ContextParallel, of_windows: RotaryEmbedding | None = None) -> None:
        super().__init__()
        self.table, self.cp, self.of_windows = table, cp, of_windows
        self.documents: Documents | None = None
        self._rows, self._tables = cache(self._make_rows), cache(self._make_table)

    def _make_table(self, length: int) -> Tensor:
        angles = self.table.get_emb(length)
        return torch.cat([angles, self.of_windows.get_emb(length)], dim=-1) if self.of_windows else angles

    def _make_rows(self, length: int) -> Tensor:
        whole = self._make_table(length)
        return whole.index_select(0, to_device(self.cp.positions(length), whole.device))

    def get_rotary_seq_len(self, context, decoder, decoder_input, config, packed_seq_params) -> int:
        """The length of the whole sequence, packed or not. megatron-core asks for it before each `forward`."""
        documents = packed_seq_params.documents if isinstance(packed_seq_params, PackedDocuments) else None
        self.documents = documents if placement_of(documents) else None
        return self.table.get_rotary_seq_len(context, decoder, decoder_input, config, None)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None) -> Tensor:
        """Angles [max_seq_len / n, 1, 1, d] of this rank's positions, with megatron-core's parameters.

        Raises:
            UsageError: an offset, or packed sequences without `use_layout`.
        """
        if packed_seq or offset:
            raise UsageError(
                "RoPE of the layout: offsets are not supported, and packed sequences need use_layout(model, cp)"
            )
        if self.documents is None:
            return self._rows(max_seq_len)
        assert self.documents.sample_length  # of placed documents
        positions = self.cp.positions(max_seq_len, self.documents) % self.documents.sample_length
        return self.at(positions, self.documents.sample_length)

    def at(self, positions: Tensor, length: int) -> Tensor:
        """Angles [rows, 1, 1, d] of positions int64 [rows] below `length`."""
        table = self._tables(1 << (length - 1).bit_length())  # so that few tables cover all lengths
        return table.index_select(0, to_device(positions, table.device))


def use_layout(model: GPTModel, cp: ContextParallel) -> None:
    """Makes `model` use RoPE in the layout of `cp`, and stores `cp` as `model.context_parallel`.

    Megatron's `thd` packed sequences are expected in the order of the layout too. The table of rotations has no
    parameters, so checkpoints do not change. A call of the model raises UsageError for labels or positions that are
    not sharded like the tokens, and for a cache of megatron-core.

    Raises:
        UsageError: megatron-core's YaRN or multimodal RoPE, with their own positions, or multi-token prediction.
    """
    check_shifts(model, cp.n)
    if model.position_embedding_type == "mrope" and cp.n > 1:
        raise UsageError(
            "position_embedding_type mrope: megatron-core cuts its angles in zigzag; take that, without use_layout"
        )
    if model.position_embedding_type == "yarn":
        raise UsageError("position_embedding_type yarn: give rope, and call use_yarn(model, ...) before use_layout")
    model.context_parallel = cp
    accept_thd(model)
    model.register_forward_pre_hook(_check_call, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, ContextParallelAttention):
            module.follows_layout = True
    if model.position_embedding_type == "rope":
        share_cos_and_sin()
        model.rotary_pos_emb = LayoutRotaryEmbedding(model.rotary_pos_emb, cp, _of_windows(model))


def _of_windows(model: GPTModel) -> RotaryEmbedding | None:
    """The rotary embedding of the layers with a window, if they have another base."""
    config = model.config
    if not isinstance(config, ModelConfig) or not config.rotary_base_of_windows:
        return None
    return RotaryEmbedding(
        config.kv_channels,
        model.rotary_percent,
        rotary_base=config.rotary_base_of_windows,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=model.pg_collection.cp,
    )


def _check_call(model: GPTModel, args: tuple, kwargs: dict[str, Any]) -> None:
    given = dict(zip(_CALL, args, strict=False)) | kwargs
    if (given.get("inference_context") or given.get("inference_params")) is not None:
        raise UsageError("inference_context: megatron-core's caches do not support layouts; generate with Session")
    tokens = given.get("input_ids")
    packed = kwargs.get("packed_seq_params")
    placed = isinstance(packed, PackedDocuments) and packed.documents is not None and packed.documents.sample_length
    length = placed or (0 if tokens is None else tokens.shape[1] * model.context_parallel.n)
    if tokens is not None and model.training and length > model.max_sequence_length:
        each = f"tokens {list(tokens.shape)} on each of {model.context_parallel.n} ranks"
        raise UsageError(
            f"{each}: more than max_sequence_length {model.max_sequence_length}; shard them with shard_batch"
        )
    if given.get("position_ids") is None and model.pre_process and model.position_embedding_type == "learned_absolute":
        raise UsageError("position_ids: missing; give those of shard_batch(batch, cp)")
    for name in ("position_ids", "labels"):
        if tokens is not None and given.get(name) is not None and given[name].shape[-1] != tokens.shape[-1]:
            shapes = f"{list(given[name].shape)} for tokens {list(tokens.shape)}"
            raise UsageError(f"{name} {shapes}: shard all of them with shard_batch(batch, cp)")
