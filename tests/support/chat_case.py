"""Small chats, and a real tokenizer with a chat template for them."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{% for message in messages %}{% if message.role == "assistant" %}<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}"""
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SPECIALS = ("<|im_start|>", "<|im_end|>")
VOCABULARY = 259  # bytes, two newlines, and these


def tokenizer(folder: Path, template: str = CHATML) -> str:
    """Write a tokenizer of bytes that joins two newlines. Its offsets leave white space out, as Llama 3's do."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(letters | {"ĊĊ": len(letters)}, [("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIALS[1], additional_special_tokens=[SPECIALS[0]]
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def chat(*contents: str, system: str | None = None) -> dict:
    """A line of a file: contents of the user and the assistant in turn, after one of the system."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def write(path: Path, lines: list[dict]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)
