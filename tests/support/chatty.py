"""Tokenizers with a chat, in a module that imports nothing slow: readers of requests import it."""

import os

from megatron.context_parallel.inference.tokenizer import ByteTokenizer


class Panic(BaseException):
    """As tokenizers raises it: no Exception."""


class Chatty(ByteTokenizer):
    """The chat template has faults: some messages make it take forever, others all memory."""

    has_chat = True

    def chat(self, messages, **options):
        said = "".join(message["content"] for message in messages)
        while said == "forever":
            pass
        if said == "memory":
            return [*bytes(8 << 30)]
        if said == "abort":
            os.abort()
        if said == "panic":
            raise Panic("at\nthe disco")
        return list(said.encode())
