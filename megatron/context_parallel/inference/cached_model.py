"""Calls a megatron-core model with the attention of a pass, at given positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.integration.rope import LayoutRotaryEmbedding
from megatron.context_parallel.integration.spec import AttentionOverride, ContextParallelAttention

from .batch_layout import BatchLayout


class PassInputs(NamedTuple):
    """The inputs of a pass besides its attention.

    Attributes:
        tokens, places: tokens int64 [rows], and their positions.
        wanted: int64 [sequences], the rows whose logits are computed.
        angles: the angles of the rotary embedding, if the model has one.
    """

    tokens: Tensor
    places: Tensor
    wanted: Tensor
    angles: Tensor | None


class CachedModel:
    """A model whose keys and values are in a cache.

    Attributes:
        model: the megatron-core model.
        cores: its core attentions, by layer.

    Raises:
        UsageError: inference does not support the model.
    """

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self.cores = _cores(model)
        _check(model, self.cores)
        rope = getattr(model, "rotary_pos_emb", None)
        self._rope = rope if isinstance(rope, LayoutRotaryEmbedding) else None

    def inputs(self, batch: BatchLayout) -> PassInputs:
        """The inputs for this rank's rows of a batch; a dummy row of zeros if it has none."""
        tokens, places = batch.tokens, batch.positions
        if not batch.rows:
            tokens, places = tokens.new_zeros(1), places.new_zeros(1)
        wanted = torch.tensor([*batch.last.values()] or [0], device=batch.device)
        angles = self._rope.at(places, batch.longest) if self._rope else None
        return PassInputs(tokens, places, wanted, angles)

    def __call__(
        self, attend: AttentionOverride, tokens: Tensor, places: Tensor, wanted: Tensor, angles: Tensor | None
    ) -> Tensor:
        """The logits [1, wanted, vocabulary] of `PassInputs`; `attend` computes the attention of each layer."""
        with self._installed(attend, wanted, angles):
            return self.model(tokens.unsqueeze(0), places.unsqueeze(0), None, runtime_gather_output=True)

    @contextmanager
    def _installed(self, attend: AttentionOverride, wanted: Tensor, angles: Tensor | None) -> Iterator[None]:
        """A context in which the model uses the cache and the given positions, and computes only the wanted logits."""

        def last_rows(_: object, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return (args[0].index_select(0, wanted), *args[1:]), kwargs

        training = self.model.training
        hook = self.model.output_layer.register_forward_pre_hook(last_rows, with_kwargs=True)
        if self._rope:
            self._rope.angles = angles
        for core in self.cores:
            core.attention_override = attend
        if training:
            self.model.eval()
        try:
            yield
        finally:
            hook.remove()
            if self._rope:
                self._rope.angles = None
            for core in self.cores:
                core.attention_override = None
            if training:
                self.model.train()


def _cores(model: GPTModel) -> list[ContextParallelAttention]:
    found = [module for module in model.modules() if isinstance(module, ContextParallelAttention)]
    return sorted(found, key=lambda core: core.layer_number)


def _check(model: GPTModel, cores: list[ContextParallelAttention]) -> None:
    """Raises UsageError for a model that inference does not support."""
    config = model.config
    if not (model.pre_process and model.post_process):
        raise UsageError(
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size}: not supported, because the ranks "
            "of a context group wait for each other in each layer; give 1, and more context ranks"
        )
    if len(cores) != config.num_layers:
        raise UsageError(f"the session needs our attention in all {config.num_layers} layers; build with block_spec")
    if any(core.attn_mask_type is not AttnMaskType.causal for core in cores):
        raise UsageError("the session needs causal attention: keys of later tokens do not exist yet")
    if config.sequence_parallel:
        raise UsageError("--sequence-parallel: not supported, ranks have any number of rows; leave it out")
    if config.fp8:
        raise UsageError(f"--fp8-format {config.fp8}: not supported, ranks have any number of rows; leave it out")
    if model.position_embedding_type == "rope" and not isinstance(model.rotary_pos_emb, LayoutRotaryEmbedding):
        raise UsageError("the model's RoPE uses megatron-core's positions; call use_layout(model, cp) first")
    if model.position_embedding_type not in ("rope", "learned_absolute", "none"):
        raise UsageError(f"--position-embedding-type {model.position_embedding_type}: give rope or learned_absolute")
