"""The cache of sample indices. A file that changed since it was written is removed, and megatron-core rebuilds it."""

import hashlib
import json
import os
from pathlib import Path

import numpy

_DIGESTS = "sha256.json"  # of every file, by name


def drop_damaged(cache: Path) -> list[Path]:
    """Remove and return the files that are truncated or have changed since `record`. One rank calls it."""
    digests = _digests(cache)
    damaged = [path for path in sorted(cache.glob("*.npy")) if not _is_intact(path, digests.get(path.name))]
    for path in damaged:
        path.unlink()
    return damaged


def record(cache: Path) -> None:
    """Record the checksums of the files. One rank calls it, when all of them are complete."""
    known = _digests(cache)
    digests = {path.name: known.get(path.name) or _digest(path) for path in sorted(cache.glob("*.npy"))}
    if digests != known:
        draft = cache / f"{_DIGESTS}.{os.getpid()}.tmp"
        draft.write_text(json.dumps(digests, indent=1))
        draft.replace(cache / _DIGESTS)


def _digests(cache: Path) -> dict[str, str]:
    try:
        return dict(json.loads((cache / _DIGESTS).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _is_intact(path: Path, digest: str | None) -> bool:
    try:  # megatron-core would unpickle it, and run its code
        numpy.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:
        return False
    return not digest or _digest(path) == digest  # a run may have been killed before it recorded the file


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
