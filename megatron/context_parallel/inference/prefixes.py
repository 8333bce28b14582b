"""Finds the cached sequence with the longest common prefix with a prompt: an index of token blocks."""

import hashlib
from collections.abc import Iterator, Sequence

BLOCK = 16  # tokens


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

    def longest(self, key: str, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The sequence with the longest common prefix with `tokens`, and its length; None below one block."""
        holders, blocks = dict[int, None](), 0
        for digest in _chain(key, tokens, len(tokens), []):
            if digest not in self._holders:
                break
            holders, blocks = self._holders[digest], blocks + 1
        if not holders:
            return None
        shared = {sequence: _common(*self._cached[sequence], tokens, blocks * BLOCK) for sequence in holders}
        best = max(shared, key=lambda sequence: shared[sequence])
        return best, shared[best]


def _chain(key: str, tokens: Sequence[int], count: int, known: Sequence[bytes]) -> Iterator[bytes]:
    """The hashes of the whole blocks among the first `count` tokens after those that are `known`."""
    digest = known[-1] if known else hashlib.blake2b(key.encode(), digest_size=16).digest()
    for start in range(len(known) * BLOCK, count - BLOCK + 1, BLOCK):
        block = ",".join(map(str, tokens[start : start + BLOCK])).encode()
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        yield digest


def _common(cached: Sequence[int], count: int, tokens: Sequence[int], known: int) -> int:
    """The length of the common prefix of two sequences, whose first `known` tokens are equal."""
    count = min(count, len(tokens))
    return next((i for i in range(known, count) if cached[i] != tokens[i]), count)
