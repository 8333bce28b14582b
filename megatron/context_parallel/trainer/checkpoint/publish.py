"""Makes a folder with a whole checkpoint the latest checkpoint of its directory."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from .manifest import Manifest, make_manifest, write_manifest
from .store import ARGUMENTS, TRACKER, delete, iteration_of, replaced


def publish(temporary: Path, final: Path, arguments: Mapping[str, object], records: Manifest) -> None:
    """Add arguments and manifest, flush everything to disk, rename the folder, and only then update the tracker.

    Args:
        temporary: the folder of the checkpoint while it is written.
        final: `iter_NNNNNNN`; a checkpoint of that name is replaced.
        arguments: the arguments of the run, as JSON.
        records: known records of files for the manifest; other files are read.

    Raises:
        OSError: writing failed.
    """
    (temporary / ARGUMENTS).write_text(json.dumps(arguments, indent=1, sort_keys=True))
    write_manifest(temporary, make_manifest(temporary, records))
    for path in [*temporary.rglob("*"), temporary]:
        _flush(path)
    if final.exists():
        final.rename(replaced(final))
    temporary.rename(final)
    _flush(final.parent)
    tracker = final.parent / TRACKER
    draft = tracker.with_suffix(".incomplete")
    draft.write_text(str(iteration_of(final)))
    _flush(draft)
    draft.replace(tracker)
    _flush(final.parent)
    if replaced(final).exists():
        delete(replaced(final))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
