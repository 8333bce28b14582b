"""Each family of models: converted both ways, its logits and texts as transformers', trained on several ranks."""

import json
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron.context_parallel import UsageError
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.integration.huggingface.config import config_of, model_flags
from megatron.context_parallel.integration.huggingface.families import FAMILIES, WITHOUT_EFFECT
from megatron.context_parallel.integration.huggingface.folder import SafetensorsFolder
from megatron.context_parallel.integration.huggingface.weights import to_huggingface
from megatron.context_parallel.trainer.config.workload import model_of
from tests.support import training_case
from tests.support.convert_case import check_flags_file, convert, finetune
from tests.support.llama_case import VOCABULARY, load_llama

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "qwen2": {
        "model_type": "qwen2",
        **{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        "rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False, "beta_fast": 16.0},
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "rope_parameters": YARN,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 1.5},
        "rope_parameters": YARN | {"factor": 32.0, "truncate": False, "rope_theta": 150000.0},
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **{"sliding_window": 8, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 500.0,
    },
}
TEXT = torch.randint(VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(3))
SHARES = torch.randn(2, 96, VOCABULARY, generator=torch.Generator().manual_seed(4))  # of the logits in a loss
PROMPTS, NEW = [TEXT[0, :70].tolist(), TEXT[1, :5].tolist()], 5


def save_model(folder: Path, family: str) -> PreTrainedModel:
    """A random model of 2 layers, also saved in `folder`."""
    values = {
        **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 512},
        **{"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2},
        **MODELS[family],
    }
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).eval()
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 0.6, 0.3)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def continued(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = [*prompt]
    for _ in range(NEW):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def there_and_back(folder: Path) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Logits and gradients of the HuggingFace folder and of the checkpoint made of it."""
    convert("to-megatron", folder / "hf", folder / "run")
    convert("to-hf", folder / "run", folder / "back")
    found = []
    for source in ("hf", "run"):
        args, _, model = load_llama(folder / source)
        assert model_of(args).parameters == sum(weight.numel() for weight in model.parameters())
        model.requires_grad_()
        logits = model(TEXT, torch.arange(96).expand(2, -1), None)[..., :VOCABULARY]
        (logits * SHARES).sum().backward()
        gradients = ((name, weight.grad) for name, weight in model.named_parameters())
        found.append((logits.detach(), dict(to_huggingface(gradients, model.config, VOCABULARY))))
        training_case.forget_graphs([model])
        parallel_state.destroy_model_parallel()
    return found


def texts(folder: Path, tensor: int) -> list[list[int]]:
    """The most likely continuations, generated together with a cache that the ranks share."""
    _, cp, model = load_llama(folder, tensor)
    session = Session(model, cp, cache_tokens=1024)
    new = {session.open(): prompt for prompt in PROMPTS}
    found: dict[int, list[int]] = {sequence: [] for sequence in new}
    for _ in range(NEW):
        logits = session.forward(new)
        chosen = session.share({sequence: [float(row.argmax())] for sequence, row in logits.items()})
        new = {sequence: [int(token)] for sequence, (token,) in chosen.items()}
        for sequence, tokens in new.items():
            found[sequence] += tokens
    parallel_state.destroy_model_parallel()
    return [*found.values()]


def split_experts(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of all experts of a layer in memory, by the names that their weights have in files."""
    found = {}
    for name, whole in gradients.items():
        for expert, part in enumerate(whole if ".experts." in name else ()):
            prefix, _, kind = name.rpartition(".")
            kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
            for weight, rows in zip(kinds, part.chunk(len(kinds)), strict=True):
                found[f"{prefix}.{expert}.{weight}.weight"] = rows
    return found


@pytest.mark.parametrize("family", MODELS)
def test_a_family_is_that_of_transformers_in_both_directions(ranks, tmp_path, family):
    theirs = save_model(tmp_path / "hf", family)
    (found,) = ranks(1, there_and_back, tmp_path)
    expected = theirs(TEXT).logits
    (expected * SHARES).sum().backward()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert type(again) is type(theirs) and torch.equal(again(TEXT).logits, expected)
    check_flags_file(tmp_path / "run", model_flags(tmp_path / "hf")["window_size"])
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    if family == "qwen3_moe":
        gradients |= split_experts(gradients)
    for ours, named in found:
        assert (ours - expected).norm() < 1e-5 * expected.norm()
        for name, gradient in named.items():
            assert (gradient - gradients[name]).norm() < 1e-5 * gradients[name].norm(), name
    first, last = SafetensorsFolder(tmp_path / "hf"), SafetensorsFolder(tmp_path / "back")
    assert first.names == last.names
    for name in first.names:
        assert torch.equal(first.read(name), last.read(name)), name
    spread = (4, texts, tmp_path / "run", 2) if family in ("qwen2", "gemma3") else (3, texts, tmp_path / "hf", 1)
    assert ranks(*spread)[0] == [continued(theirs, prompt) for prompt in PROMPTS]


MESH = {"cp_strategy": "mesh", "context_parallel_size": 2, "pipeline_model_parallel_size": 2}
USP = {"cp_strategy": "usp", "context_parallel_size": 4, "cp_options": {"head_parallel_size": 2}}


@pytest.mark.parametrize(("family", "spread"), [("gpt_oss", USP), ("gemma3", MESH)])
def test_training_does_not_depend_on_the_ranks(ranks, tmp_path, family, spread):
    save_model(tmp_path / "hf", family)
    ranks(1, convert, "to-megatron", tmp_path / "hf", tmp_path / "run")
    (expected,) = ranks(1, finetune, tmp_path / "run", None, {})
    losses = ranks(4, finetune, tmp_path / "run", None, {"cp_layout": None, **spread})[0]
    assert losses == pytest.approx(expected, rel=1e-5)


def changed(value: object) -> object:
    """Another value of the kind of `value`."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case None:
            return 7
        case str():
            return "other"
        case [*kinds]:
            return [1] if not kinds else [*reversed(kinds)]
    return {}


@pytest.mark.parametrize("family", MODELS)
def test_every_field_of_transformers_is_read_or_refused(tmp_path, family):
    save_model(tmp_path, family)
    path = tmp_path / "config.json"
    good, flags = json.loads(path.read_text()), model_flags(tmp_path)
    model_type = good["model_type"]
    without_effect = {*PreTrainedConfig().to_dict(), *WITHOUT_EFFECT, *FAMILIES[model_type].ignores} - {"dtype"}
    silent = set()
    fields = AutoConfig.from_pretrained(tmp_path).to_dict().items()
    for name, value in ((name, value) for name, value in fields if name != "rope_parameters"):
        path.write_text(json.dumps(good | {name: changed(value)}))
        try:
            if model_flags(tmp_path) == flags:
                silent.add(name)
        except UsageError as refusal:
            said = str(refusal)
            assert any(word in said for word in (name, "layer_types", "rejected by transformers")), said
    # these decide layer_types or the window, which are given here, or a reversed list is the same
    assert silent - without_effect <= {"use_sliding_window", "max_window_layers", "sliding_window", "layer_types"}
    path.write_text(json.dumps(config_of(flags | {"bf16": False, "fp16": False}, VOCABULARY)))
    assert model_flags(tmp_path) == flags


# What published models have in config.json beside the sizes.
QWEN = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-06}
PUBLISHED = {
    "Qwen2.5-7B-Instruct, extended": (
        QWEN
        | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645}
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28}
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "max_window_layers": 28, "vocab_size": 152064}
        | {"rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False}
        | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}
        | {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "add_qkv_bias": True, "window_size": None}
        | {"yarn_original_max_position_embeddings": 32768, "rotary_base": 1000000, "kv_channels": 128, "bf16": True},
    ),
    "Qwen3-30B-A3B": (
        QWEN
        | {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128}
        | {"hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48}
        | {"mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
        | {"num_key_value_heads": 4, "output_router_logits": False, "rope_scaling": None, "rope_theta": 1000000.0}
        | {"router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936},
        {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_router_pre_softmax": False}
        | {"qk_layernorm": True, "position_embedding_type": "rope"},
    ),
    "gpt-oss-20b": (
        {"quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"}}
        | {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 64}
        | {"experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096}
        | {"intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12}
        | {"max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64}
        | {"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32}
        | {"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9}
        | {
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"}
            | {"original_max_position_embeddings": 4096, "truncate": False}
        }
        | {"sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088},
        {"window_size": (127, 0), "window_attn_skip_freq": "2", "softmax_type": "learnable", "moe_router_topk": 4}
        | {"activation_func_clamp_value": 7.0, "yarn_correction_range_round_to_int": False, "add_bias_linear": True},
    ),
    "gemma-3-1b-it": (
        {"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256}
        | {"attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None}
        | {"eos_token_id": [1, 106], "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152}
        | {"intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text"}
        | {"num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256}
        | {"rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000}
        | {"sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144},
        {"window_size": (511, 0), "window_attn_skip_freq": "6", "rotary_base_of_windows": 10000}
        | {"rotary_base": 1000000, "softmax_scale": 0.0625, "untie_embeddings_and_output_weights": False},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_published_models_are_read_whole(tmp_path, name):
    given, expected = PUBLISHED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    flags = model_flags(tmp_path)
    assert {name: flags[name] for name in expected} == expected
    refused = {
        "quantization_config": ({"quant_method": "gptq"}, "quantization_config gptq: only MXFP4 of gpt_oss is read"),
        "attention_dropout": (0.1, "attention_dropout 0.1 is not supported"),
        "new_feature": ("on", "new_feature on is not supported"),
    }
    for field, (value, said) in refused.items():
        path.write_text(json.dumps(given | {field: value}))
        with pytest.raises(UsageError, match=said):
            model_flags(tmp_path)


def test_mxfp4_is_unpacked_as_by_transformers(tmp_path):
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(97, 157, (3, 8, 2), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert folder.names == {name}
    expected = convert_moe_packed_tensors(blocks, scales)
    assert expected.shape == (3, 64, 8)
    assert all(torch.equal(folder.read_row(name, i, 3), expected[i]) for i in range(3))
