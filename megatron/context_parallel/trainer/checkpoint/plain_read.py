"""Reads checkpoints as data alone: what in a pickle of one would run code is refused.

megatron-core and PyTorch unpickle three things: `common.pt`, `.metadata`, and the objects in the shards. They restrict
the first alone.
"""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.rerun_state_machine import Call, Caller
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from megatron.context_parallel.errors import UsageError

_CHECKPOINT = "torch.distributed.checkpoint"
_IN_METADATA = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_CHECKPOINT}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    f"{_CHECKPOINT}.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}
_ONLY_WEIGHTS, _NOT_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


@contextmanager
def plain_reads(checkpoint: Path) -> Iterator[None]:
    """Within it PyTorch and megatron-core read checkpoints as data alone.

    Raises:
        UsageError: `checkpoint` holds more; nothing of it was run.
    """
    environment, read = dict(os.environ), FileSystemReader.read_metadata
    os.environ.pop(_NOT_ONLY, None)
    os.environ[_ONLY_WEIGHTS] = "1"  # torch.load also where weights_only=False is asked for
    FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign, assignment]
    try:
        with torch.serialization.safe_globals([Call, Caller]):  # what --rerun-mode saves; megatron-core allows the rest
            yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        if wanted := _asked_for(error):
            why = f"it would run {wanted} while it is loaded, and was not; give a checkpoint that this program saved"
            raise UsageError(f"--load {checkpoint.parent}: {checkpoint.name} holds more than data: {why}") from error
        raise
    finally:
        FileSystemReader.read_metadata = read  # type: ignore[method-assign]
        for name in (_ONLY_WEIGHTS, _NOT_ONLY):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]


def _asked_for(error: BaseException) -> str | None:
    """The function or class that a pickle asked for, if that is why it was refused; on any rank."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, pickle.UnpicklingError) and (found := _REFUSED.search(str(cause))):
            return found[1].rstrip(".")
    return None


def _read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    """In place of PyTorch's, which runs what a pickle says."""
    with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
        metadata = _Unpickler(stream).load()  # type: ignore[arg-type]  # every stream can be read by line
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name in _IN_METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
