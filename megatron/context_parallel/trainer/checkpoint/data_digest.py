"""Checksums of training data. They show whether a resumed run has the data of its checkpoint.

The whole index is read, but only 256 parts of the tokens: reading all of them would take as long as an epoch.
"""

from pathlib import Path
from typing import TypeAlias

from xxhash import xxh3_64

from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.data.tokenizer import tokenizer_files

from .manifest import file_record

# By prefix: of the index, and of parts of the tokens. By file of chats: of the file, and of the tokenizer's files.
Digests: TypeAlias = dict[str, tuple[str, str]]

_PARTS = 256
_PART = 4096  # bytes; a file of _PARTS * _PART bytes is read whole


def data_digests(args: Arguments) -> Digests:
    """The checksums of each prefix that is trained on; none for `--mock-data`.

    Raises:
        OSError: a file cannot be read.
    """
    from megatron.core.datasets.utils import get_blend_from_list  # which a dry run does not wait for

    given = args.train_data_path or args.data_path
    if args.mock_data or not given:
        return {}
    prefixes, _ = get_blend_from_list(given)
    if args.sft:
        assert args.tokenizer_model  # which its tokenizer needs
        tokenizer = xxh3_64()
        for path in tokenizer_files(args.tokenizer_model):
            tokenizer.update(path.read_bytes())
        return {path: (file_record(Path(path)).checksum, tokenizer.hexdigest()) for path in prefixes}
    return {prefix: (file_record(Path(prefix + ".idx")).checksum, _of_parts(prefix)) for prefix in prefixes}


def _of_parts(prefix: str) -> str:
    """A checksum of the size of the token file, and of evenly spaced parts, including the first and the last."""
    path = Path(prefix + ".bin")
    size = path.stat().st_size
    digest = xxh3_64(str(size).encode())
    with open(path, "rb", buffering=0) as stream:
        for part in range(_PARTS):
            stream.seek(part * max(0, size - _PART) // (_PARTS - 1))
            digest.update(stream.read(_PART))
    return digest.hexdigest()


def changed(args: Arguments, saved: Digests, now: Digests) -> str | None:
    """The difference of the first prefix that has changed, in words; None if none has changed."""
    index_of, tokens_of = ("{} has other chats", "{} has other tokens, by another tokenizer or chat template,")
    if not args.sft:
        index_of, tokens_of = ("{}.idx has other documents", "{}.bin has other tokens")
    for prefix, (index, tokens) in now.items():
        before = saved.get(prefix, (index, tokens))
        if before[0] != index:
            return index_of.format(prefix)
        if before[1] != tokens:
            return tokens_of.format(prefix)
    return None
