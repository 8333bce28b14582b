"""The cache of sample indices: a file that is not as it was written is removed, and megatron-core makes it again."""

import hashlib
import json
import os
from pathlib import Path

import numpy

_DIGESTS = "sha256.json"  # of every file, by name


def drop_damaged(cache: Path) -> list[Path]:
    """Remove the files that are cut short or were changed since `record`, and return them. One rank calls it."""
    digests = _digests(cache)
    damaged = [path for path in sorted(cache.glob("*.npy")) if not _is_intact(path, digests.get(path.name))]
    for path in damaged:
        path.unlink()
    return damaged


def record(cache: Path) -> None:
    """Write down how the files are now. One rank calls it, when all of them are complete."""
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
    try:  # megatron-core would run a pickle
        numpy.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:
        return False
    return not digest or _digest(path) == digest  # the run that was to write it down may have been killed before


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
