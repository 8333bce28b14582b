"""Writes chats about sums, and the chat template of a small tokenizer: small_chats.py MODEL CHATS.jsonl

MODEL is a folder of small_llama.py. The template marks no answers: each is what follows the chat up to it.
"""

import json
import random
import sys
from pathlib import Path

TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}</s>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
CHATS = 400


def main(model: str, output: str) -> None:
    (Path(model) / "chat_template.jinja").write_text(TEMPLATE)
    draw = random.Random(0)
    with open(output, "w") as lines:
        for _ in range(CHATS):
            messages = []
            for _ in range(draw.randint(1, 6)):
                one, other = draw.randint(0, 9), draw.randint(0, 9)
                messages.append({"role": "user", "content": f"What is {one} + {other}?"})
                messages.append({"role": "assistant", "content": f"{one} + {other} = {one + other}"})
            lines.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
