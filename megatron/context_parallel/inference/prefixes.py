"""Finds the cached sequence with the longest common prefix with a prompt: an index of token blocks."""

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence

BLOCK = 16  # tokens


class Prompt:
    """The tokens that a prompt may share, and the hashes of their blocks, each computed once.

    Args:
        key: prompts with different keys share nothing.
        tokens: the prompt. Its last token is never shared, because its logits are needed.
    """

    def __init__(self, key: str, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.count = len(tokens) - 1
        self.hashes: list[bytes] = []
        self._rest = _chain(key, tokens, self.count, [])

    def next_hash(self) -> bytes | None:
        """Computes the hash of one more block; None at the end."""
        digest = next(self._rest, None)
        if digest is not None:
            self.hashes.append(digest)
        return digest


class Prefixes:
    """Cached sequences by the hashes of their blocks. A hash covers all tokens up to the end of its block.

    Sequences with different keys never match.
    """

    def __init__(self) -> None:
        self._cached: dict[int, tuple[Sequence[int], int]] = {}
        self._hashes: dict[int, list[bytes]] = {}
        self._holders: dict[bytes, dict[int, None]] = {}  # in order of arrival

    def add(self, sequence: int, key: str, tokens: Sequence[int], cached: int) -> None:
        """Index the first `cached` tokens of a sequence. Call it again when more are cached. They must not change."""
        self._cached[sequence] = tokens, cached
        known = self._hashes.setdefault(sequence, [])
        if cached < (len(known) + 1) * BLOCK:
            return
        for digest in _chain(key, tokens, cached, known):
            known.append(digest)
            self._holders.setdefault(digest, {})[sequence] = None

    def remove(self, sequence: int) -> None:
        """Remove a sequence; unknown ones are ignored."""
        self._cached.pop(sequence, None)
        for digest in self._hashes.pop(sequence, ()):
            holders = self._holders[digest]
            del holders[sequence]
            if not holders:
                del self._holders[digest]

    def longest(self, prompt: Prompt) -> tuple[int, int] | None:
        """The sequence with the longest common prefix with a prompt, and its length; None below one block."""
        # Who has a block has those before it, so the known hashes are halved instead of compared one by one.
        blocks = bisect_left(prompt.hashes, True, key=lambda digest: digest not in self._holders)
        while blocks == len(prompt.hashes) and prompt.next_hash() in self._holders:
            blocks += 1
        if not blocks:
            return None
        shared = {}
        for sequence in self._holders[prompt.hashes[blocks - 1]]:
            shared[sequence] = _common(*self._cached[sequence], prompt, blocks * BLOCK)
        best = max(shared, key=lambda sequence: shared[sequence])
        return best, shared[best]


def _chain(key: str, tokens: Sequence[int], count: int, known: Sequence[bytes]) -> Iterator[bytes]:
    """The hashes of the whole blocks among the first `count` tokens after those that are `known`."""
    digest = known[-1] if known else hashlib.blake2b(key.encode(), digest_size=16).digest()
    for start in range(len(known) * BLOCK, count - BLOCK + 1, BLOCK):
        block = ",".join(map(str, tokens[start : start + BLOCK])).encode()
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        yield digest


def _common(cached: Sequence[int], count: int, prompt: Prompt, known: int) -> int:
    """The length of the common prefix of a sequence and a prompt, whose first `known` tokens are equal."""
    count = min(count, prompt.count)
    return next((i for i in range(known, count) if cached[i] != prompt.tokens[i]), count)
