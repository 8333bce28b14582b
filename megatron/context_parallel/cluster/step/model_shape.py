"""The sizes of a GPT model, its parameters and its floating-point operations."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model. The fields have the names and meanings of the trainer's flags.

    Attributes:
        padded_vocab_size: rows of the embedding. It depends on the tensor-parallel size.
        positions: rows of a learned position table; 0: RoPE.
        window_size: tokens that each sees before itself; None: all.
        full_layers: layers without that window.
        swiglu: whether the MLP is a gated linear unit, of any kind.
        num_experts: MLPs of a layer, of width `moe_ffn_hidden_size`; None: one, of width `ffn_hidden_size`.
        expert_model_parallel_size: ranks that the experts are sharded over.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    positions: int = 0
    window_size: int | None = None
    full_layers: int = 0
    normalization: str = "RMSNorm"
    softmax_type: str = "vanilla"
    qk_layernorm: bool = False
    sandwich_norm: bool = False
    swiglu: bool = True
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = True
    num_experts: int | None = None
    expert_model_parallel_size: int = 1
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_topk: int = 2

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.kv_channels * self.num_attention_heads

    @property
    def keys(self) -> int:
        """Width of all key heads together, or of all value heads."""
        return self.kv_channels * self.num_query_groups

    @property
    def widest_window(self) -> int | None:
        """Tokens that a token sees before itself in the layers where it sees the most; None: all."""
        return None if self.full_layers else self.window_size

    @property
    def mlp_width(self) -> int:
        """Width of the MLP that a token passes, or of its experts together."""
        if not self.num_experts:
            return self.ffn_hidden_size
        return self.moe_router_topk * (self.moe_ffn_hidden_size or 0) + (self.moe_shared_expert_intermediate_size or 0)

    @property
    def mlp_inputs(self) -> int:
        """Width of what the MLP's first product makes: with SwiGLU a gate and a value."""
        return self.ffn_hidden_size * (2 if self.swiglu else 1)

    # -- parameters --------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """All parameters; rows that pad the vocabulary included."""
        return self.num_layers * self.layer_parameters() + self.table_parameters + self._norm(self.hidden_size)

    @property
    def table_parameters(self) -> int:
        """Those of them in token embedding, position table and untied output layer."""
        return self._input(1) + (self._output(1) if self.untie_embeddings_and_output_weights else 0)

    def parameters_on_stage(self, stage: int, stages: int = 1, tensor: int = 1, experts_over: int = 1) -> int:
        """Parameters of a rank of pipeline stage `stage` (0 first); both end stages keep a tied output layer."""
        count = self.num_layers // stages * self.layer_parameters(tensor, experts_over)
        if stage == 0:
            count += self._input(tensor)
        if stage == stages - 1:
            count += self._norm(self.hidden_size)
            if self.untie_embeddings_and_output_weights or stages > 1:
                count += self._output(tensor)
        return count

    def layer_parameters(self, tensor: int = 1, experts_over: int = 1) -> int:
        """One layer on one of `tensor` ranks: projections are split; norms and row-parallel biases are not.

        Its experts are split over `experts_over` ranks.
        """
        h, qkv = self.hidden_size, self.queries + 2 * self.keys
        split = h * qkv + self.queries * h + self._mlp_parameters(experts_over)
        norms = 4 if self.sandwich_norm else 2
        whole = norms * self._norm(h) + (2 * self._norm(self.kv_channels) if self.qk_layernorm else 0)
        whole += (self.num_experts or 0) * h  # the router
        if self.softmax_type == "learnable":
            split += self.num_attention_heads
        if self.add_bias_linear or self.add_qkv_bias:
            split += qkv
        if self.add_bias_linear and self.num_experts:
            gates = 2 if self.swiglu else 1
            whole += h + self.num_experts  # projection, router
            whole += self.num_experts // experts_over * ((self.moe_ffn_hidden_size or 0) * gates + h)
        elif self.add_bias_linear:
            split += self.mlp_inputs
            whole += 2 * h
        return split // tensor + whole

    def largest_weight(self, tensor: int = 1) -> int:
        """Numbers in the largest matrix of one of `tensor` ranks."""
        width = (self.moe_ffn_hidden_size or 0) * (2 if self.swiglu else 1) if self.num_experts else self.mlp_inputs
        rows = max(self.padded_vocab_size, self.queries + 2 * self.keys, width) // tensor
        return max(rows, self.positions) * self.hidden_size

    def _mlp_parameters(self, experts_over: int) -> int:
        """Weights of a layer's MLP, or of the experts of one of `experts_over` ranks and of the shared one."""
        width = self.ffn_hidden_size
        if self.num_experts:
            width = self.num_experts // experts_over * (self.moe_ffn_hidden_size or 0)
            width += self.moe_shared_expert_intermediate_size or 0
        return self.hidden_size * width * (3 if self.swiglu else 2)

    def _norm(self, width: int) -> int:
        return width * (2 if self.normalization == "LayerNorm" else 1)

    def _input(self, tensor: int) -> int:
        return (self.padded_vocab_size // tensor + self.positions) * self.hidden_size

    def _output(self, tensor: int) -> int:
        return self.padded_vocab_size // tensor * self.hidden_size

    # -- floating-point operations -----------------------------------------------------------------------------

    def flops_per_sequence(self, seq_length: int) -> float:
        """Floating-point operations of a sequence of `seq_length` tokens that is one document: see `flops`."""
        return self.flops(seq_length, [seq_length])

    def flops(self, tokens: int, documents: Iterable[int]) -> float:
        """Floating-point operations of `tokens` tokens, forward and backward, over all ranks.

        A token sees only tokens of its document; `documents` has their lengths.
        A matrix product of m x k by k x n is 2mkn; the backward pass is twice the forward pass. Per token and layer,
        with h = hidden_size, a = kv_channels * num_attention_heads and g = kv_channels * num_query_groups:

            2h(a + 2g) + 2ah        projections
            2 * 2 * a * seen        attention: QK^T and PV; of a document of s tokens s / 2 are seen, of a window w < s,
                                    w - w^2 / 2s, averaged over layers with and without a window
            2h * ffn * (3 or 2)     MLP: three products for SwiGLU, else two; ffn = mlp_width

        and 2h * padded_vocab_size for the logits. Recomputation does not count.
        """
        h, a, g = self.hidden_size, self.queries, self.keys
        layer = 2 * h * (a + 2 * g) + 2 * a * h + 2 * h * self.mlp_width * (3 if self.swiglu else 2)
        layer += 2 * h * (self.num_experts or 0)  # the router
        attention = 4 * a * sum(self._pairs(length) for length in documents)
        return 3.0 * (tokens * (self.num_layers * layer + 2 * h * self.padded_vocab_size) + self.num_layers * attention)

    def _pairs(self, length: int) -> float:
        """Pairs of a query and a key that it sees in a document of `length` tokens, as a mean over the layers."""
        window = length if self.window_size is None else min(self.window_size, length)
        pairs = window * length - window**2 / 2
        return pairs + self.full_layers / self.num_layers * (length**2 / 2 - pairs)
