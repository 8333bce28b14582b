"""Our attention as megatron-core's `core_attention`, and the layer spec that contains it."""

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron.context_parallel.attention.api import context_parallel_attention
from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.patches.megatron_experts import parts_of_mlp
from megatron.context_parallel.patches.megatron_norms import recompute_without_fp8
from megatron.context_parallel.plan.ir import CONTEXT_FIRST
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.tokens.documents import Documents, placement_of

from .experts import ExpertProjection, Router
from .gemma import RowParallelLinearWithNorm, SelfAttentionWithOwnAngles
from .model_config import ModelConfig
from .norm import Norm
from .packed import PackedDocuments
from .transformer_engine import check_importable

# Computes [s, 1, heads, d] over a cache from a layer's attention, queries, keys and values.
CachedAttention = Callable[["ContextParallelAttention", Tensor, Tensor, Tensor], Tensor]
IN_ZIGZAG = "shards sequences in zigzag; give a strategy with layout=zigzag, such as ring:layout=zigzag"
Contexts = ContextParallel | Sequence[ContextParallel]  # for all layers, or one for each layer of the whole model
PLAIN = {  # fields of a configuration that select other layers than those of `block_spec`
    "multi_latent_attention": False,
    "qk_l2_norm": False,
    "experimental_attention_variant": None,
    "heterogeneous_block_specs": False,
}
LOCAL = ("num_moe_experts", "sandwich_norm", "rotary_base_of_windows")  # which Transformer Engine's layers do not have


def unlike_megatron(cp: ContextParallel) -> str:
    """Why tokens do not lie as in megatron-core's own context parallelism; nothing if they do."""
    if cp.layout != "zigzag" and cp.n > 1:
        return f"--cp-layout {cp.layout}: the model's RoPE uses zigzag"
    if not cp.in_rank_order:
        return f"--cp-placement {CONTEXT_FIRST}: the model's RoPE has the chunks in the order of the ranks"
    return ""


class ContextParallelAttention(MegatronModule):
    """The core attention of a layer, computed by all ranks of the context-parallel group together.

    megatron-core builds and calls it like its own `DotProductAttention`. A group of one rank also works.

    Attributes:
        follows_layout: the model's RoPE uses the layout of `cp` (`use_layout`); megatron-core's own layout is zigzag.
            None: not known until the model's `forward` was checked (`megatron_model.check_layers`).

    Raises:
        UsageError: the configuration has a feature that this attention does not support.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        cp: Contexts,
        backend: str = "auto",
        keep_output: bool = False,
        follows_layout: bool | None = False,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise UsageError(f"--attention-dropout {dropout}: context-parallel attention has no dropout; give 0")
        if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
            raise UsageError("fp8_dot_product_attention: not supported, attention runs in 16 or 32 bits; leave it out")
        for name in ("qk_clip", "log_max_attention_logit"):
            if getattr(config, name, False):
                raise UsageError(f"{name}: needs the largest score, which is not kept; leave it out")
        if k_channels and follows_layout is False:
            raise UsageError("--multi-latent-attention: works with integration.megatron_lm only")
        if k_channels and config.apply_rope_fusion:
            raise UsageError("--multi-latent-attention: its fused RoPE supports only zigzag; give --no-rope-fusion")
        if attention_type != "self":
            raise UsageError(f"{attention_type} attention: not supported; use self-attention")
        self.attn_mask_type = attn_mask_type
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = tuple(config.window_size) if windowed else (-1, -1)
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.cp = cp[layer_number - 1] if isinstance(cp, Sequence) else cp
        if self.cp.n != config.context_parallel_size:
            raise UsageError(
                f"--context-parallel-size {config.context_parallel_size}: the group of cp has {self.cp.n} ranks; give "
                "ContextParallel(strategy, group=parallel_state.get_context_parallel_group())"
            )
        self.backend, self.layer_number, self.follows_layout = backend, layer_number, follows_layout
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.softmax_offset = self._softmax_offset()
        # Recomputations follow the order of their forward passes, so a queue for each layer is enough.
        self.kept: deque | None = deque() if keep_output else None

    def _softmax_offset(self) -> Tensor | None:
        """The sinks of this rank's heads, under the name in megatron-core's core attention; None for plain softmax."""
        config = self.config
        tensor = self.pg_collection.tp.size()
        if config.softmax_type == "vanilla":
            return None
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        zeros = torch.zeros(config.num_attention_heads // tensor, device=device, dtype=config.params_dtype)
        if config.softmax_type == "off-by-one":
            return zeros
        offset = torch.nn.Parameter(zeros)
        set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            config.init_method(offset)
        return offset

    def _check_layout(self, documents: Documents | None) -> None:
        """Raises UsageError unless the tokens lie as in megatron-core."""
        given = unlike_megatron(self.cp)
        if placement_of(documents):
            given = "documents with a placement: the model's RoPE uses zigzag"
        if given and self.follows_layout is None:
            raise UsageError(f"--cp-layout {self.cp.layout}: a model with its own forward {IN_ZIGZAG}")
        if given:
            raise UsageError(f"{given}; call use_layout(model, cp) first")

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """The learnable sinks, split by tensor parallelism along the heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: CachedAttention | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[s, b, heads, d] of this rank's tokens to [s, b, heads * d].

        megatron-core passes its attention mask on as it is. A pass over a cache gives its attention in this place.

        Raises:
            UsageError: an explicit mask, a bias, a cache, or a layout, a placement or packed sequences that need
                `use_layout`.
        """
        recorder.at_layer(self.layer_number)
        if callable(attention_mask):
            return attention_mask(self, query, key, value).flatten(2)
        mask = attn_mask_type or self.attn_mask_type
        if mask not in (AttnMaskType.causal, AttnMaskType.no_mask) or attention_mask is not None:
            raise UsageError(f"attention mask {mask.name}: give causal or no_mask, without a mask tensor")
        if attention_bias is not None:
            raise UsageError("attention bias: not supported; leave it out")
        if len(key) != len(query):
            raise UsageError(
                f"{len(query)} queries, {len(key)} keys: megatron-core's caches are not supported; use Session"
            )
        documents = None
        if packed_seq_params is not None:
            if not isinstance(packed_seq_params, PackedDocuments):
                raise UsageError("packed_seq_params: call use_layout(model, cp) first, or pass PackedDocuments")
            documents = packed_seq_params.over(query.shape[1], self.cp.length(query))
        if not self.follows_layout:
            self._check_layout(documents)
        out = context_parallel_attention(
            query,
            key,
            value,
            self.cp,
            causal=mask is AttnMaskType.causal,
            window=self.window,
            documents=documents,
            scale=self.scale,
            sinks=self.softmax_offset,
            kernel=kernel_for(query.device, query.dtype, query.shape[-1], self.backend, value_dim=value.shape[-1]),
            kept=self.kept if is_checkpointing() else None,
        )
        assert isinstance(out, Tensor)  # without the log-sum-exp
        return out.flatten(2)


def use_core_attention(layer: ModuleSpec, cp: Contexts, backend: str = "auto", keep_output: bool = False) -> ModuleSpec:
    """Replaces the attention in a layer spec of megatron-core, its own or Transformer Engine's, with ours.

    Args:
        layer: a spec with self-attention. It is modified and returned.
        cp: the context group, shared by all layers, because it holds communicators. Or one for each layer of the whole
            model, all with the same layout (`groups.contexts_by_layer`), selected by the layer's number.
        backend: `--cp-attention-backend`.
        keep_output: recomputation reuses the attention's output and log-sum-exp of the forward pass (LoongTrain's
            Selective Checkpoint++, section 5.2; LightSeq's section 3.3).
    """
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=ContextParallelAttention, params={"cp": cp, "backend": backend, "keep_output": keep_output}
    )
    return layer


def block_spec(
    config: TransformerConfig, cp: Contexts, layers: int, backend: str = "auto", keep_output: bool = False
) -> TransformerBlockSubmodules:
    """megatron-core's GPT layers with our attention, and the final norm.

    `config.transformer_impl` selects Transformer Engine's linear layers and norms, or megatron-core's own linear layers
    with norms that work on any device. Other arguments are those of `use_core_attention`.

    Raises:
        UsageError: the configuration asks for other layers, or Transformer Engine is selected and cannot be imported.
    """
    _check_layers(config)
    if config.transformer_impl == "transformer_engine":
        check_importable()
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        norm = TESpecProvider().layer_norm()
    else:
        layer = _local_layer(config)
        norm = Norm
    return TransformerBlockSubmodules([use_core_attention(layer, cp, backend, keep_output)] * layers, layer_norm=norm)


def _check_layers(config: TransformerConfig) -> None:
    """Raises UsageError for layers that would be built as if a field of the configuration were not set."""
    if config.transformer_impl not in ("local", "transformer_engine"):
        raise UsageError(f"transformer_impl {config.transformer_impl}: give local or transformer_engine")
    for name, value in PLAIN.items():
        if (given := getattr(config, name, value)) not in (value, None):
            raise UsageError(f"{name} {given}: block_spec has no such layers; give {value}")
    frequency = config.moe_layer_freq
    if config.num_moe_experts and not (frequency == 1 or (isinstance(frequency, list) and all(frequency))):
        raise UsageError(f"moe_layer_freq {frequency}: block_spec gives all layers experts; give 1")
    for name in LOCAL if config.transformer_impl == "transformer_engine" else ():
        if given := getattr(config, name, None):
            why = "block_spec has none with transformer_impl 'transformer_engine'"
            raise UsageError(f"{name} {given}: {why}; give transformer_impl 'local'")


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    recompute_without_fp8()
    layer = get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    if config.num_moe_experts:
        mlp = parts_of_mlp(layer.submodules.mlp)
        mlp.router = Router
        if config.add_bias_linear:
            parts_of_mlp(mlp.experts).linear_fc2 = ExpertProjection
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    if isinstance(config, ModelConfig):
        _change_as_in_gemma(layer, config)
    return layer


def _change_as_in_gemma(layer: ModuleSpec, config: ModelConfig) -> None:
    attention = layer.submodules.self_attention
    if config.sandwich_norm:
        attention.submodules.linear_proj = RowParallelLinearWithNorm
        parts_of_mlp(layer.submodules.mlp).linear_fc2 = RowParallelLinearWithNorm
    if config.rotary_base_of_windows:
        attention.module = SelfAttentionWithOwnAngles
