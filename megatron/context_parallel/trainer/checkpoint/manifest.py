"""The manifest of a checkpoint: size and checksum of every file in it, to detect damage by the storage.

The checksum is XXH3, 64 bits. It detects accidents; it does not protect against an attacker.
"""

import json
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64

from megatron.context_parallel.progress import Progress, gigabytes

MANIFEST = "manifest.json"
_THREADS = 4  # files that one process reads at a time
_BLOCK = 1 << 22  # bytes


class File(NamedTuple):
    """The record of a file in a manifest."""

    bytes: int
    checksum: str


Manifest = dict[str, File]
"""Records by the path of a file in its checkpoint."""


def file_record(path: Path) -> File:
    """Size and checksum of a file.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxh3_64()
    size = 0
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return File(size, digest.hexdigest())


def make_manifest(directory: Path, known: Manifest) -> Manifest:
    """The records of all files in a checkpoint; those in `known` are not read again."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    return {name: known.get(name) or file_record(directory / name) for name in sorted(names)}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, with a checksum of itself, and flush it to the disk."""
    files = {name: list(record) for name, record in manifest.items()}
    with open(directory / MANIFEST, "w") as stream:
        json.dump({"checksums": "xxh3_64", "of files": _own_checksum(files), "files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it has none.

    Raises:
        ValueError: it is damaged; the message says how.
    """
    try:
        text = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    try:
        content = json.loads(text)
        if content["of files"] != _own_checksum(content["files"]):
            raise ValueError
        return {name: File(*record) for name, record in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{MANIFEST} is damaged") from None


def _own_checksum(files: dict[str, list]) -> str:
    return xxh3_64(json.dumps(files, sort_keys=True).encode()).hexdigest()


def size_faults(directory: Path, manifest: Manifest) -> list[str]:
    """A line for each file that is missing or has another size. Contents are not read."""
    return [fault for name, record in manifest.items() if (fault := _size_fault(directory / name, name, record))]


def _size_fault(path: Path, name: str, record: File) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except ValueError:
        return f"{name!r} is not a file name"
    if not path.is_file():
        return f"{name} is not a file"
    if size != record.bytes:
        return f"{name} has {size} bytes, not the {record.bytes} that were written"
    return None


def content_faults(directory: Path, manifest: Manifest, names: Collection[str]) -> list[str]:
    """A line for each of the files `names` that cannot be read, or whose contents have changed."""
    progress = Progress(f"verifying {directory.name}", sum(manifest[name].bytes for name in names), gigabytes)
    found = []
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = pool.map(lambda name: _content_fault(directory / name, name, manifest[name]), names)
        for name, fault in zip(names, faults, strict=True):
            found += [fault] if fault else []
            progress.advance(manifest[name].bytes)
    return found


def _content_fault(path: Path, name: str, record: File) -> str | None:
    if fault := _size_fault(path, name, record):
        return fault
    try:
        same = file_record(path) == record
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if same else f"{name} is damaged: its contents have changed since it was written"


def share_of(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """The files that one of `ranks` reads when all of them check a checkpoint: each file once, bytes balanced."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(manifest, key=lambda name: (-manifest[name].bytes, name)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += manifest[name].bytes + 1
    return shares[rank]
