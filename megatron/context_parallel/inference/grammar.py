"""Texts that follow a grammar: which tokens may come next, by the library llguidance."""

from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .faults import GrammarFault
from .tokenizer import HuggingFaceTokenizer, Tokenizer


class Grammars:
    """Makes the matchers of an engine's texts.

    Args:
        tokenizer: the tokenizer of the model.
        vocabulary: the number of logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._ends = sorted([end for end in tokenizer.ends if end < vocabulary])

    def prepare(self) -> None:
        """Read the vocabulary now, if llguidance is installed: the first matcher would do it while all texts wait."""
        if find_spec("llguidance") and self._ends:
            _ = self._tokens

    def matcher(self, grammar: str) -> "Matcher":
        """A matcher at the start of a text.

        Raises:
            UsageError: the grammar is invalid or too large, or the tokenizer has no end token.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"the grammar is invalid ({' '.join(matcher.get_error().split())[:200]}); correct it")
        return Matcher(matcher, self.vocabulary)

    @cached_property
    def _tokens(self) -> Any:
        """llguidance's tokenizer: the bytes of all tokens."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self._ends:
            raise UsageError("a text that follows a grammar must be able to end, but the tokenizer has no end token")
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            from llguidance.hf import from_tokenizer  # imports transformers

            return from_tokenizer(self.tokenizer.of_transformers, n_vocab=self.vocabulary, eos_token=self._ends)
        pieces = TokenizerWrapper(_Pieces(self.tokenizer, self.vocabulary))
        return LLTokenizer(pieces, n_vocab=self.vocabulary, eos_token=self._ends)


class _Pieces:
    """The vocabulary of another tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        missing = [b""] * (vocabulary - len(tokenizer.pieces))
        self.eos_token_id = min(tokenizer.ends)
        self.tokens = [*tokenizer.pieces, *missing][:vocabulary]
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if not piece]
        self._number = {piece: token for token, piece in enumerate(self.tokens) if piece}
        self._longest = max(map(len, self._number))
        for token in self.special_token_ids:
            self.tokens[token] = b"<%d>" % token

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that the grammar leaves no choice about: the longest that fits, and so on."""
        found = list[int]()
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._number), 0)
            if not size:
                break  # llguidance continues by itself
            found.append(self._number[text[:size]])
            text = text[size:]
        return found


class Matcher:
    """The place of one text in its grammar.

    Every rank has one for each text and makes the same calls, also without the logits: llguidance counts its work, and
    ends a text that takes too much, so all ranks end it at the same token.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [vocabulary].

        Raises:
            GrammarFault: the grammar took too much work.
        """
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        bits = words.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
        return (bits & 1).flatten()[: self._vocabulary].bool()

    def advance(self, token: int) -> None:
        """Continue after a token of the text.

        Raises:
            GrammarFault: the grammar does not allow it, or took too much work.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFault
