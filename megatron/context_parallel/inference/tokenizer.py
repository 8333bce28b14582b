"""Tokenizers for generation: exact bytes, special tokens, end tokens, chat templates."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from megatron.context_parallel.errors import UsageError

from .token_bytes import pieces_of


class Tokenizer(Protocol):
    """The interface of a tokenizer for generation.

    Attributes:
        ends: tokens that end a text.
        has_chat: whether there is a chat template.
        longest: the number of characters of the longest token.
        pieces: the bytes that each token adds to a text; b"" for special tokens.
    """

    ends: frozenset[int]
    has_chat: bool
    longest: int

    @property
    def pieces(self) -> Sequence[bytes]: ...

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """The tokens of a prompt, including special tokens that the model expects before it.

        `special` says whether to include them, if the tokenizer has any.
        """

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without special ones; bytes that are not a character become U+FFFD."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The tokens of a conversation, up to the start of the answer.

        Args:
            messages: each has a `role` and `content`, and may have `tool_calls` or a `tool_call_id`.
            options: variables of the template, such as `tools`.

        Raises:
            UsageError: there is no chat template, or it rejects the messages.
        """


def _no_chat(of: str) -> UsageError:
    return UsageError(f"chat needs a chat template, but {of} has none; use completions")


class ByteTokenizer:
    """UTF-8 bytes and an end-of-document token. megatron-core's own drops white space at the end of a text."""

    has_chat = False
    longest = 1

    def __init__(self, end: int) -> None:
        self.ends = frozenset([end])
        self.pieces = [bytes([byte]) for byte in range(256)]

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        raise _no_chat("a byte-level tokenizer")


class SentencePieceTokenizer:
    """A SentencePiece model, as in training: a prompt gets no special tokens."""

    has_chat = False

    def __init__(self, path: str, end: int | None) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model: Any = SentencePieceProcessor(model_file=path)
        self.longest = max(map(len, self._model.id_to_piece([*range(self._model.vocab_size())])))
        self.ends = frozenset() if end is None else frozenset([end])

    @cached_property
    def pieces(self) -> list[bytes]:
        return [self._piece(token) for token in range(self._model.vocab_size())]

    def _piece(self, token: int) -> bytes:
        text = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes.fromhex(text[3:5])
        if self._model.is_control(token) or self._model.is_unknown(token) or self._model.is_unused(token):
            return b""
        return text.replace("\u2581", " ").encode()

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return self._model.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._model.decode(tokens)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        raise _no_chat("a SentencePiece tokenizer")


class HuggingFaceTokenizer:
    """The tokenizer of a HuggingFace folder. None of its code runs; its chat template runs in jinja2's sandbox.

    Args:
        folder: a folder with tokenizer.json.
        special: whether a prompt gets the special tokens that the folder configures, such as Llama's BOS.
        chats: whether the model was trained on chats of its template. Then the token after an answer ends a text too.

    Attributes:
        of_transformers: the tokenizer of transformers.

    Raises:
        UsageError: the folder has no readable tokenizer.
    """

    def __init__(self, folder: str, special: bool, chats: bool = False) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported
        from transformers import AutoTokenizer

        try:
            self.of_transformers: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            self.longest = max(map(len, self.of_transformers.get_vocab()))
        except BaseException as error:
            why = _reason(error)
            raise UsageError(f"{folder}: its tokenizer cannot be read ({why}); copy tokenizer.json there") from error
        self._folder, self._special = folder, special
        self.has_chat = bool(self.of_transformers.chat_template)
        self.ends = frozenset([*end_tokens(Path(folder)), self.of_transformers.eos_token_id]) - {None}
        if chats and (end := self.missing_end()) is not None:
            self.ends |= {end}

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return self.of_transformers.encode(text, add_special_tokens=self._special if special is None else special)

    def decode(self, tokens: list[int]) -> str:
        return self.of_transformers.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def pieces(self) -> list[bytes]:
        return pieces_of(self.of_transformers)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if not self.has_chat:
            raise _no_chat(self._folder)
        apply = self.of_transformers.apply_chat_template
        if taken := [name for name in options if name in signature(apply).parameters and name != "tools"]:
            raise UsageError(f"chat_template_kwargs: {taken[0]!r} is no variable of a template; leave it out")
        try:
            text = apply([*messages], tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # a template can raise anything
            raise UsageError(f"messages: the chat template rejects them ({_reason(error)})") from None
        return self.of_transformers.encode(text, add_special_tokens=False)  # the template wrote them

    def missing_end(self) -> int | None:
        """The token that the chat template writes after an answer, if texts do not end there; None if they do."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text = self.of_transformers.apply_chat_template(messages, tokenize=False)
        except Exception:  # there is no template, or it rejects these messages
            return None
        behind = self.of_transformers.encode(text.rpartition("answer")[2], add_special_tokens=False)
        marks = [token for token in behind if token in self.of_transformers.added_tokens_decoder]
        return marks[0] if marks and marks[0] not in self.ends else None


def _reason(error: BaseException) -> str:
    """Why a library failed, in one short line. KeyboardInterrupt and SystemExit are raised again."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return " ".join(str(error).split())[:200] or type(error).__name__


def end_tokens(folder: Path) -> list[int]:
    """The end tokens of a HuggingFace folder: those in generation_config.json, or else in config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            ends = json.loads((folder / name).read_bytes()).get("eos_token_id")
        except (OSError, ValueError, RecursionError, AttributeError):  # missing, not JSON, or not an object
            continue
        if ends is not None:
            return ends if isinstance(ends, list) else [ends]
    return []
