"""A layer of a decode step on fixed buffers: the operations of megatron-core's plain layers, without their modules."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.context_parallel.integration.model_config import ModelConfig
from megatron.context_parallel.integration.norm import Norm
from megatron.context_parallel.integration.spec import ContextParallelAttention
from megatron.context_parallel.patches.megatron_rope import rotary_scale

from .decode_product import PackedWeights, Product

ACTIVATIONS = {F.silu: torch.ops.aten.silu.out, F.gelu: torch.ops.aten.gelu.out}


class Attention(Protocol):
    """The attention of a step."""

    @property
    def size(self) -> int:
        """The rows of the step."""
        ...

    def write(self, core: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Computes `out` from queries, keys and values, all [size, heads, d]."""
        ...


class NormBuffers:
    """Buffers of the norms of x [..., size], which may be a view."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.wide = torch.zeros(shape, dtype=wide, device=device)
        self.squares = torch.zeros_like(self.wide)
        self.scale = self.wide.new_zeros(*shape[:-1], 1)
        self.statistics: tuple[Tensor, ...] = ()  # of LayerNorm; their dtype depends on the device

    def __call__(self, norm: Norm, x: Tensor, out: Tensor) -> None:
        """Writes the normalized x to `out`."""
        if norm.bias is not None:
            given = x, norm.weight.shape, norm.weight, norm.bias, norm.eps
            self.statistics = self.statistics or torch.native_layer_norm(*given)[1:]
            mean, scale = self.statistics
            torch.ops.aten.native_layer_norm.out(*given, out0=out, out1=mean, out2=scale)
            return
        if x.dtype is not self.wide.dtype:
            x = self.wide.copy_(x)
        torch.mul(x, x, out=self.squares)
        torch.mean(self.squares, -1, keepdim=True, out=self.scale)
        self.scale.add_(norm.eps).rsqrt_()
        torch.mul(x, self.scale, out=self.wide)
        torch.mul(self.wide, norm.weight, out=self.wide if out.dtype is not self.wide.dtype else out)
        if out.dtype is not self.wide.dtype:
            out.copy_(self.wide)


class Rotation:
    """The rotation of queries or keys by position.

    Args:
        source, target: [rows, ..., d]; cos, sin: [rows, ..., angles]; the other elements of d are copied.
    """

    def __init__(self, source: Tensor, target: Tensor, cos: Tensor, sin: Tensor) -> None:
        angles = cos.shape[-1]
        half = angles // 2
        self.cos = cos
        self.source, self.target = source[..., :angles], target[..., :angles]
        self.rest = (target[..., angles:], source[..., angles:]) if angles < source.shape[-1] else None
        self.swapped = torch.zeros_like(self.target)
        self.halves = [
            (source[..., half:angles], sin[..., :half], self.swapped[..., :half]),
            (source[..., :half], sin[..., half:], self.swapped[..., half:]),
        ]

    def __call__(self) -> None:
        for x, sin, out in self.halves:
            torch.mul(x, sin, out=out)
        torch.mul(self.source, self.cos, out=self.target)
        self.target.add_(self.swapped)
        if self.rest:
            self.rest[0].copy_(self.rest[1])


class LayerBuffers:
    """The buffers of a decode step of some rows, and the views into them that all layers use.

    Args:
        config: the model's configuration; rows: the rows of the step; angles: the width of the rotary angles, or 0.
        packed: packed weights of the products, if the weights do not change.

    Attributes:
        x: [rows, hidden], the input of a layer and then its output.
        cos, sin: [rows, 1, angles], set for each step; the first half of sin is negated.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rows: int,
        angles: int,
        dtype: torch.dtype,
        device: torch.device,
        packed: PackedWeights | None = None,
    ) -> None:
        def new(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        heads, groups, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
        assert groups is not None and d is not None  # megatron-core has set them
        self.x = new(config.hidden_size)
        self.normed = new(config.hidden_size)
        self.residual = new(config.hidden_size)
        self.mixed = new(groups * (heads // groups + 2) * d)
        by_group = self.mixed.view(rows, groups, heads // groups + 2, d)
        self.q = by_group[:, :, : heads // groups]
        self.k = by_group[:, :, -2]
        self.v = by_group[:, :, -1]
        self.turned_q, self.turned_k = new(groups, heads // groups, d), new(groups, d)
        self.normed_q = torch.zeros_like(self.turned_q) if config.qk_layernorm else self.q
        self.normed_k = torch.zeros_like(self.turned_k) if config.qk_layernorm else self.k
        self.cos, self.sin = new(1, angles), new(1, angles)
        self.rotary_scale = rotary_scale(config)
        self.rotations = [
            Rotation(self.normed_q, self.turned_q, self.cos.unsqueeze(1), self.sin.unsqueeze(1)),
            Rotation(self.normed_k, self.turned_k, self.cos, self.sin),
        ]
        self.queries = self.turned_q.view(rows, heads, d)
        self.attended = new(heads * d)
        self.by_head = self.attended.view(rows, heads, d)
        ffn = config.ffn_hidden_size
        self.gated = config.gated_linear_unit
        self.inner = new((1 + self.gated) * ffn)
        self.gate, self.linear = self.inner[:, :ffn], self.inner[:, ffn:]
        self.active = new(ffn)
        self.to_qkv = Product(self.normed, self.mixed, packed)
        self.to_residual = Product(self.attended, self.residual, packed)
        self.to_inner = Product(self.normed, self.inner, packed)
        self.from_inner = Product(self.active, self.residual, packed)
        self.norm = NormBuffers(self.x.shape, dtype, device)
        if config.qk_layernorm:
            self.q_norm = NormBuffers(self.turned_q.shape, dtype, device)
            self.k_norm = NormBuffers(self.turned_k.shape, dtype, device)

    def set_angles(self, angles: Tensor) -> None:
        """The angles [rows, 1, 1, angles] of the rows of a step."""
        self.cos.copy_(angles.squeeze(1).cos() * self.rotary_scale)
        sin = angles.squeeze(1).sin() * self.rotary_scale
        half = sin.shape[-1] // 2
        self.sin.copy_(sin)
        self.sin[..., :half].neg_()


class DecodeLayer:
    """A plain layer. `plain` says which layers are.

    The weights are read from the modules in each step, so they may change.
    """

    def __init__(self, layer: TransformerLayer) -> None:
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        attention = layer.self_attention
        self.core = attention.core_attention
        self.qkv, self.proj = attention.linear_qkv, attention.linear_proj
        self.normed = layer.config.qk_layernorm
        self.q_norm, self.k_norm = attention.q_layernorm, attention.k_layernorm
        self.fc1, self.fc2 = layer.mlp.linear_fc1, layer.mlp.linear_fc2
        self.linears = self.qkv, self.proj, self.fc1, self.fc2
        self.activate = _activation(layer.config)

    def weights(self) -> Iterator[Tensor | None]:
        """All tensors of the modules that a step reads, in the same order each time; None for missing ones."""
        for module in (self.input_norm, self.mlp_norm, *self.linears):
            yield module.weight
            yield module.bias
        if self.normed:
            for norm in (self.q_norm, self.k_norm):
                yield norm.weight
                yield norm.bias
        yield self.core.softmax_offset

    def attend(self, buffers: LayerBuffers, attend: Attention) -> None:
        """Computes `buffers.attended` from `buffers.x`."""
        buffers.norm(self.input_norm, buffers.x, buffers.normed)
        buffers.to_qkv(self.qkv.weight, self.qkv.bias)
        if self.normed:
            buffers.q_norm(self.q_norm, buffers.q, buffers.normed_q)
            buffers.k_norm(self.k_norm, buffers.k, buffers.normed_k)
        for rotate in buffers.rotations:
            rotate()
        attend.write(self.core, buffers.queries, buffers.turned_k, buffers.v, buffers.by_head)

    def finish(self, buffers: LayerBuffers) -> None:
        """Computes the output, `buffers.x`, from the input `buffers.x` and from `buffers.attended`."""
        buffers.to_residual(self.proj.weight, self.proj.bias)
        buffers.x.add_(buffers.residual)
        buffers.norm(self.mlp_norm, buffers.x, buffers.normed)
        buffers.to_inner(self.fc1.weight, self.fc1.bias)
        self.activate(buffers.gate, out=buffers.active)
        if buffers.gated:
            buffers.active.mul_(buffers.linear)
        buffers.from_inner(self.fc2.weight, self.fc2.bias)
        buffers.x.add_(buffers.residual)


def _activation(config: TransformerConfig) -> Callable[..., Tensor]:
    if config.activation_func is F.gelu and config.bias_activation_fusion:  # megatron-core's fused GELU has tanh
        return partial(ACTIVATIONS[F.gelu], approximate="tanh")
    return ACTIVATIONS[config.activation_func]


def plain(model: GPTModel) -> bool:
    """Whether `DecodeLayer` knows all modules of a model: dense layers of megatron-core's own, on one tensor rank."""
    config = model.config
    known = (
        config.transformer_impl == "local"
        and config.tensor_model_parallel_size == 1
        and config.activation_func in ACTIVATIONS
        and not (config.multi_latent_attention or config.rotary_interleaved or config.fp32_residual_connection)
        and not (config.mtp_num_layers or config.attention_output_gate or config.no_rope_freq)
        and not (config.layernorm_zero_centered_gamma or config.glu_linear_offset or config.activation_func_clamp_value)
        and not (isinstance(config, ModelConfig) and config.scale_embeddings)
    )
    return known and all(map(_plain, model.decoder.layers))


def _plain(layer: Any) -> bool:
    if type(layer) is not TransformerLayer or type(layer.self_attention) is not SelfAttention:
        return False
    if type(layer.mlp) is not MLP or type(layer.input_layernorm) is not Norm:
        return False
    attention, mlp = layer.self_attention, layer.mlp
    columns = type(attention.linear_qkv) is type(mlp.linear_fc1) is ColumnParallelLinear
    rows = type(attention.linear_proj) is type(mlp.linear_fc2) is RowParallelLinear
    # Without norms of queries, megatron-core before 0.19 has an IdentityOp there, and since then None.
    norms = (Norm,) if layer.config.qk_layernorm else (IdentityOp, type(None))
    return columns and rows and type(attention.q_layernorm) in norms
