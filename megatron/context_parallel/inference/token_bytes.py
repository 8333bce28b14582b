"""The bytes that each token of a HuggingFace tokenizer adds to a text."""

import json
import re
from typing import Any

_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def pieces_of(tokenizer: Any) -> list[bytes]:
    """The bytes of each token, by its number; b"" for special tokens and numbers without a token.

    Args:
        tokenizer: a tokenizer of transformers, over one of the library tokenizers.
    """
    vocabulary = tokenizer.get_vocab()
    special = {*tokenizer.all_special_ids}
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    special |= {number for number, token in added.items() if token.special}
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    kinds = {part["type"] for part in [decoder, *decoder.get("decoders", ())] if part}
    pieces = [b""] * (1 + max(vocabulary.values()))
    for text, number in vocabulary.items():
        if number in special:
            continue
        if number in added:
            pieces[number] = text.encode()
        elif "ByteLevel" in kinds:
            pieces[number] = bytes([_BYTE_OF[letter] for letter in text]) if {*text} <= _BYTE_OF.keys() else b""
        elif "ByteFallback" in kinds and (found := _BYTE.fullmatch(text)):
            pieces[number] = bytes.fromhex(found[1])
        elif kinds & {"ByteFallback", "Metaspace"}:
            pieces[number] = text.replace(_SPACE, " ").encode()
        else:
            pieces[number] = tokenizer.decode([number]).encode()
    return pieces


def _letters() -> dict[str, int]:
    """The byte of each letter of byte-level tokenizers: itself if it can be printed, else one from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _letters()
