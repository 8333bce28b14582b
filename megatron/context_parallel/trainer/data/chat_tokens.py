"""The tokens of a file of chats: written to the cache once, then memory-mapped by every rank."""

import hashlib
import os
from itertools import accumulate
from pathlib import Path

import numpy

from megatron.context_parallel.errors import UsageError

from .chat_template import ChatTemplate
from .chats import EXAMPLE, read_chats


class ChatTokens:
    """The tokens of the chats of file `path_prefix`, with the interface of megatron-core's IndexedDataset.

    Attributes:
        sequence_lengths: tokens of each chat, int64 [chats].
    """

    def __init__(self, path: str, cache: Path) -> None:
        tokens, bounds = _files(path, cache)
        self.path_prefix = path
        self._tokens = numpy.load(tokens, mmap_mode="r")
        self._bounds = numpy.load(bounds, mmap_mode="r")
        self.sequence_lengths = numpy.diff(self._bounds)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, chat: int, offset: int, length: int) -> numpy.ndarray:
        """Token ids, int32 [length]; of a token that is not of an answer, the complement, which is below 0."""
        begin = self._bounds[chat] + offset
        return self._tokens[begin : begin + length]


def write_chat_tokens(path: str, cache: Path, template: ChatTemplate) -> None:
    """Write the tokens of a file of chats to `cache`, unless they are there. One rank calls it.

    Raises:
        UsageError: a line is not a chat, or the template does not fit it.
        OSError: the cache cannot be written.
    """
    tokens, bounds = _files(path, cache)
    if tokens.exists() and bounds.exists():
        return
    print(f"tokenizing the chats of {path}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    raw = cache / f"{tokens.stem}.{os.getpid()}.raw"
    lengths = []
    try:
        with open(raw, "wb") as stream:
            for ids, answers in template.tokens_of(read_chats(path)):
                stream.write(numpy.where(answers, ids, ~ids).tobytes())
                lengths.append(len(ids))
        if not lengths:
            raise UsageError(f"{path}: has no chat; write lines such as {EXAMPLE}")
        save_array(tokens, numpy.memmap(raw, numpy.int32, "r"))
        save_array(bounds, numpy.array([*accumulate(lengths, initial=0)]))
    finally:
        raw.unlink(missing_ok=True)


def save_array(path: Path, array: numpy.ndarray) -> None:
    """Write an array so that the file is there as a whole or not at all."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with open(draft, "wb") as stream:
        numpy.save(stream, array)
    draft.replace(path)


def _files(path: str, cache: Path) -> tuple[Path, Path]:
    """The files of tokens, and of the first token of each chat and the end of the last."""
    name = hashlib.sha256(path.encode()).hexdigest()[:16]
    return cache / f"{name}-chat-tokens.npy", cache / f"{name}-chat-bounds.npy"
