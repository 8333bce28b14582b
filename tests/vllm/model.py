"""Writes a random Llama, prompts around the edges of blocks, and what transformers says after them."""

import json
import sys
from pathlib import Path

import torch

from tests.support.llama_case import save_llama, save_tokenizer

LENGTHS = [5, 31, 32, 33, 127, 128, 129, 300, 700]
NEW = 24
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 259}


def main(folder: Path) -> None:
    model = save_llama(folder / "model", "llama3", **SIZES, max_position_embeddings=2048)
    save_tokenizer(folder / "model", chat=False)
    draw = torch.Generator().manual_seed(1)
    texts = []
    for length in LENGTHS:
        prompt = torch.randint(3, 259, (1, length), generator=draw)
        with torch.no_grad():
            whole = model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        texts.append({"prompt": prompt[0].tolist(), "answer": whole[0, length:].tolist()})
    (folder / "texts.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
