"""Checksums of training data. They show whether a resumed run has the data of its checkpoint.

The whole index is read, but only 256 parts of the tokens: reading all of them would take as long as an epoch.
"""

from pathlib import Path
from typing import TypeAlias

from xxhash import xxh3_64

from megatron.context_parallel.trainer.config.flags import Arguments

from .manifest import file_record

Digests: TypeAlias = dict[str, tuple[str, str]]  # by prefix: of the index, and of parts of the tokens

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


def changed(saved: Digests, now: Digests) -> str | None:
    """The difference of the first prefix that has changed, in words; None if none has changed."""
    for prefix, (index, tokens) in now.items():
        before = saved.get(prefix, (index, tokens))
        if before[0] != index:
            return f"{prefix}.idx has other documents"
        if before[1] != tokens:
            return f"{prefix}.bin has other tokens"
    return None
