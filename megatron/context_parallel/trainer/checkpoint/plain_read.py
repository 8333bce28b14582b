"""Reads checkpoints as data only: a pickle that would run code is rejected.

megatron-core and PyTorch unpickle `common.pt`, `.metadata`, and the objects in the shards. They restrict only
`common.pt`.
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
from torch.distributed.checkpoint import CheckpointException

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.torch_checkpoint_metadata import unpickled_by

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
    """A context in which PyTorch and megatron-core read checkpoints as data only.

    Raises:
        UsageError: `checkpoint` contains more; none of its code was run.
    """
    environment = dict(os.environ)
    os.environ.pop(_NOT_ONLY, None)
    os.environ[_ONLY_WEIGHTS] = "1"  # also for calls of torch.load with weights_only=False
    try:
        # --rerun-mode saves these two; megatron-core allows the rest.
        with unpickled_by(_Unpickler), torch.serialization.safe_globals([Call, Caller]):
            yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        if wanted := _asked_for(error):
            why = f"loading it would run {wanted}, so it was not loaded; give a checkpoint that this program saved"
            raise UsageError(f"--load {checkpoint.parent}: {checkpoint.name} contains more than data: {why}") from error
        raise
    finally:
        for name in (_ONLY_WEIGHTS, _NOT_ONLY):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]


def _asked_for(error: BaseException) -> str | None:
    """The function or class that a pickle named, if it was rejected for that reason on any rank."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, pickle.UnpicklingError) and (found := _REFUSED.search(str(cause))):
            return found[1].rstrip(".")
    return None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # as Python 3.13 names it
            module = "pathlib"
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name in _IN_METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
