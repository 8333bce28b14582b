"""Reads the metadata of a distributed checkpoint with our unpickler. PyTorch's reader runs any code in the pickle."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

CHECKED = {"torch": "2.11 to 2.15"}


@contextmanager
def unpickled_by(unpickler: type[pickle.Unpickler]) -> Iterator[None]:
    """A context in which every `FileSystemReader` reads `.metadata` with `unpickler`."""

    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = unpickler(stream).load()  # type: ignore[arg-type]  # every stream can be read by line
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    theirs = FileSystemReader.read_metadata
    FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FileSystemReader.read_metadata = theirs  # type: ignore[method-assign]
