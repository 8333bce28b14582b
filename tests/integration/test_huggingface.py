"""HuggingFace models: the same logits as transformers, every weight once, and refused folders."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from megatron.context_parallel import UsageError
from megatron.context_parallel.integration.huggingface.config import model_flags
from megatron.context_parallel.integration.huggingface.folder import SafetensorsFolder
from megatron.context_parallel.integration.huggingface.weights import load_weights, to_huggingface
from tests.support.llama_case import FAMILIES, SCALED, VOCABULARY, load_llama, save_llama


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(folder: Path, tensor: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Logits [2, 96, vocabulary] of our model, and on one rank its weights as HuggingFace has them."""
    args, _, model = load_llama(folder, tensor)
    positions = torch.arange(96).expand(2, -1)
    out = model(tokens(), positions, None, runtime_gather_output=True)
    names = {}
    if tensor == 1:
        names = dict(to_huggingface(model.named_parameters(), model.config, args.vocabulary))
    parallel_state.destroy_model_parallel()
    return out, {name: weight.detach() for name, weight in names.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_and_weights_go_back_bit_for_bit(ranks, tmp_path, family):
    theirs = save_llama(tmp_path, family)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    with torch.no_grad():
        expected = theirs(tokens()).logits
    ((one, names),) = ranks(1, logits, tmp_path, 1)
    for ours in (one, ranks(2, logits, tmp_path, 2)[0][0]):
        assert (ours[..., VOCABULARY:] == -torch.inf).all()
        error = (ours[..., :VOCABULARY] - expected).norm() / expected.norm()
        assert error < 1e-5
    folder = SafetensorsFolder(tmp_path)
    assert names.keys() == folder.names
    for name, weight in names.items():
        assert torch.equal(weight, folder.read(name)), name


CONFIGS = {
    "model_type": "gemma",
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "quantization_config": {"bits": 4},
    "rope_type": "longrope",
    "partial_rotary_factor": 0.5,
    "low_freq_factor": 2.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.5,
    "dtype": "float64",
}


def test_a_config_that_gpt_model_does_not_compute_is_refused(tmp_path):
    save_llama(tmp_path, "llama3")
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    for name, value in CONFIGS.items():
        config = json.loads(json.dumps(good))
        (config["rope_parameters"] if name in SCALED or "partial" in name else config)[name] = value
        path.write_text(json.dumps(config))
        with pytest.raises(UsageError, match=re.escape(f"{path}: ") + f".*{name}"):
            model_flags(tmp_path)
    for text, said in (
        (json.dumps(good | {"num_hidden_layers": "two"}), "rejected by transformers .*num_hidden_layers"),
        ("{", "cannot be read"),
        ("[]", "contains no fields"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=re.escape(f"{path}: ") + said):
            model_flags(tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama3", "dual_chunk_attention_config", {"chunk_size": 262144}),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
        ("mistral", "layer_types", ["sliding_attention", "full_attention"]),
        ("mistral", "sliding_window", 0),
        ("llama3", "original_max_position_embeddings", 4096),  # beside the one of rope_parameters
    ],
)
def test_a_field_that_gpt_model_does_not_have_is_refused(tmp_path, family, name, value):
    save_llama(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(UsageError, match=name):
        model_flags(tmp_path)


def test_a_config_of_an_earlier_transformers_is_read_alike(tmp_path):
    save_llama(tmp_path, "llama3")
    path = tmp_path / "config.json"
    new, config = model_flags(tmp_path), json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    path.write_text(json.dumps(config))
    assert model_flags(tmp_path) == new
    assert (new["rotary_base"], new["use_rope_scaling"], new["rope_scaling_factor"]) == (500000, True, 8.0)


ODD = [  # fields in several places, and fields left out, of which transformers takes one value
    {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}, "rope_scaling": SCALED},
    {"rope_parameters": SCALED, "rope_scaling": {"type": "default"}, "rope_theta": 500000.0},
    {
        "rope_parameters": None,
        "rope_scaling": {"type": "llama3"} | {k: v for k, v in SCALED.items() if k != "rope_type"},
    },
    {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": None, "sliding_window": 1},
    {"model_type": "mistral", "num_key_value_heads": 2, "max_position_embeddings": 8192},
]


def odd_models(folder: Path) -> None:
    """Models of 1 layer with no more than these fields in config.json."""
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type")
    save_llama(folder, "llama2", "1GB", num_hidden_layers=1)
    least = {name: json.loads((folder / "config.json").read_text())[name] for name in kept}
    for changes in ODD:
        (folder / "config.json").write_text(json.dumps(least | changes))
        given = transformers.AutoConfig.from_pretrained(folder)
        torch.manual_seed(5)
        transformers.AutoModelForCausalLM.from_config(given).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(least | changes))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours, _ = logits(folder, 1)
        with torch.no_grad():
            torch.testing.assert_close(ours[..., :VOCABULARY], theirs(tokens()).logits, rtol=1e-4, atol=1e-5)


def test_odd_configs_are_read_as_transformers_reads_them(ranks, tmp_path):
    ranks(1, odd_models, tmp_path)


def refusals(folder: Path) -> list[str]:
    args, _, model = load_llama(folder)
    file, said = folder / "model.safetensors", []
    good = load_file(file)

    def attempt() -> None:
        with pytest.raises(UsageError) as refusal:
            load_weights(model, folder, args.vocabulary)
        said.append(str(refusal.value))

    name = "model.layers.1.mlp.up_proj.weight"
    for changed in (
        {key: weight for key, weight in good.items() if key != name},
        good | {"model.layers.2.mlp.up_proj.weight": good[name].clone()},
        good | {name: good[name][:-1]},
        good | {"lm_head.weight": good["lm_head.weight"][:-1]},
    ):
        save_file(changed, file)
        attempt()
    model.share_embeddings_and_output_weights = True  # as with tie_word_embeddings
    save_file(good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()}, file)
    load_weights(model, folder, args.vocabulary)
    save_file(good, file)
    attempt()
    file.write_bytes(file.read_bytes()[:5000])
    attempt()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "../other.safetensors"}}))
    attempt()
    (folder / "model.safetensors.index.json").unlink()
    file.rename(folder / "pytorch_model.bin")
    attempt()
    parallel_state.destroy_model_parallel()
    return said


def test_weights_that_are_not_those_of_the_config_are_refused(ranks, tmp_path):
    save_llama(tmp_path, "llama2", max_shard_size="1GB")
    (said,) = ranks(1, refusals, tmp_path)
    parts = [
        "no weight model.layers.1.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "up_proj.weight: shape [55, 32] in the file, [56, 32]",
        "lm_head.weight: shape [100, 32] in the file, [101, 32]",
        "lm_head.weight and model.embed_tokens.weight differ, and its config.json ties them",
        "model.safetensors: cannot be read",
        "names ../other.safetensors",
        "pickles such as pytorch_model.bin are not read",
    ]
    for line, part in zip(said, parts, strict=True):
        assert part in line, line
