"""Tiny random models of transformers, saved as HuggingFace folders, and the same models as our GPTModel."""

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.generation.flags import Source
from megatron.context_parallel.generation.load_model import load_model
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.setup import initialize_model_parallel

support_cpu_host()

VOCABULARY = 101
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama2": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "llama3": {"num_key_value_heads": 2, "rope_parameters": SCALED},
    "llama3-tied": {"num_key_value_heads": 1, "rope_parameters": SCALED, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 11},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "tie_word_embeddings": True},
}


def save_llama(folder: Path, family: str, max_shard_size: str = "20KB", **changes) -> PreTrainedModel:
    """A random model of 2 layers, also saved in `folder`."""
    values = {
        **{"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-6},
        **{"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2},
        **{"model_type": "llama"},
        **FAMILIES[family],
    }
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values | changes)).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[assistant]"
)


def save_tokenizer(folder: Path, chat: bool) -> None:
    """A byte-level tokenizer of 259 tokens: <s> (before each prompt), </s>, and the bytes from 3 on."""
    letters = {letter: 3 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT if chat else None
    fast.save_pretrained(folder)


def load_llama(folder: Path, tensor: int = 1, **changes) -> tuple[Arguments, ContextParallel, GPTModel]:
    """The model of `folder` on the ranks of this world; call `parallel_state.destroy_model_parallel` after use."""
    args = model_arguments(Source(load=str(folder), tensor_model_parallel_size=tensor, **changes))
    initialize_model_parallel(args)
    cp = ContextParallel(args.cp_layers[0], group=parallel_state.get_context_parallel_group())
    return args, cp, load_model(args, cp)
