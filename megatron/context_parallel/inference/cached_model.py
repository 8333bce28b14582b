"""Calls a megatron-core model with the attention of a pass, at given positions."""

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.integration.rope import LayoutRotaryEmbedding
from megatron.context_parallel.integration.spec import CachedAttention, ContextParallelAttention


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

    def angles(self, positions: Tensor, longest: int) -> Tensor | None:
        """The rotary angles [rows, 1, 1, d] of positions int64 [rows] below `longest`, if the model has them."""
        return self._rope.at(positions, longest) if self._rope else None

    def __call__(
        self, attend: CachedAttention, tokens: Tensor, positions: Tensor, angles: Tensor | None, wanted: Tensor
    ) -> Tensor:
        """The logits [wanted, vocabulary] of some rows.

        It calls the parts of the model, because the model itself would place the rows in a layout.

        Args:
            attend: computes the attention of each layer.
            tokens, positions: int64 [rows]; angles: of these positions.
            wanted: int64 [wanted], the rows whose logits are computed.
        """
        model = self.model
        training = model.training
        if training:
            model.eval()
        try:
            x = model.embedding(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0))
            x = model.decoder(hidden_states=x, attention_mask=attend, rotary_pos_emb=angles)
            weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
            logits, _ = model.output_layer(x.index_select(0, wanted), weight=weight, runtime_gather_output=True)
        finally:
            if training:
                model.train()
        return logits[:, 0]


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
