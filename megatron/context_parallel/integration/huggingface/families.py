"""The families of HuggingFace models that GPTModel computes, and the names of config.json that all of them share."""

from dataclasses import dataclass, field
from typing import Any

# The trainer's flags of models without anything special, by field. A family changes some of them.
PLAIN: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": 1.0,
    "rotary_base_of_windows": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_scaling_factor": 1.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "sandwich_norm": False,
    "scale_embeddings": False,
    "swiglu": True,
    "fast_geglu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "num_experts": None,
}


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`.

    Attributes:
        architecture: transformers' class.
        fields: fields of config.json, with the only value that is supported.
        flags: what the trainer's flags of all these models have other than `PLAIN`.
        reads: fields of config.json that only this family has, and that decide flags.
        ignores: fields of published models that transformers does not read.
        layer_types: whether each layer may have a window or not.
    """

    architecture: str
    fields: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    layer_types: bool = False


_SILU = {"hidden_act": "silu", "attention_dropout": 0.0}
_WINDOWS = ("use_sliding_window", "max_window_layers")  # transformers makes layer_types or sliding_window of them
_EXPERTS = ("num_local_experts", "num_experts_per_tok")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", _SILU | {"attention_bias": False, "mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", _SILU),
    "qwen2": Family("Qwen2ForCausalLM", _SILU, {"add_qkv_bias": True}, _WINDOWS, layer_types=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", _SILU | {"attention_bias": False}, {"qk_layernorm": True}, _WINDOWS, layer_types=True
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _SILU | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"qk_layernorm": True},
        (
            *_WINDOWS,
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _SILU | {"attention_bias": True, "swiglu_alpha": 1.702},
        {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
        },
        (*_EXPERTS, "swiglu_limit"),
        ("experts_per_token", "initial_context_length"),
        layer_types=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_dropout": 0.0,
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        {
            "apply_layernorm_1p": True,
            "sandwich_norm": True,
            "scale_embeddings": True,
            "qk_layernorm": True,
            "swiglu": False,
            "fast_geglu": True,
        },
        ("query_pre_attn_scalar",),
        ("cache_implementation", "sliding_window_pattern", "_sliding_window_pattern"),
        layer_types=True,
    ),
}
EVERY_FAMILY_READS = (
    *("model_type", "dtype", "torch_dtype", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "rope_parameters", "sliding_window", "layer_types"),
)
# Fields that do not change what a model computes from tokens, beside those of transformers' base class.
WITHOUT_EFFECT = (
    *("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef"),
)
