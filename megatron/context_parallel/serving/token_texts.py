"""Tokens as texts, in answers with log-probabilities: no two tokens of a list have the same one."""

import codecs
from collections.abc import Iterable, Sequence


class TokenTexts:
    """The texts of tokens.

    Args:
        pieces: the bytes that each token adds to a text; b"" for special tokens.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; b"" for special tokens."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def text(self, token: int) -> str:
        """The text of a token: part of a character as in `bytes:\\xe2\\x82`, a special one as `token_id:2`."""
        piece = self.piece(token)
        if not piece:
            return f"token_id:{token}"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in piece])

    def by_text(self, pairs: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Tokens and their numbers, by text. Of tokens with the same text, later ones are named by their number."""
        found = dict[str, float]()
        for token, number in pairs:
            text = self.text(token)
            found[f"token_id:{token}" if text in found else text] = number
        return found


class Offsets:
    """Where tokens begin in a text, in characters: a character begins with the first token that has a part of it.

    Args:
        missing: how many of the first characters the text does not have.
    """

    def __init__(self, missing: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = -missing

    def of(self, piece: bytes) -> int:
        """The offset of the next token."""
        offset = max(0, self._characters)
        self._characters += len(self._decoder.decode(piece))
        return offset
