"""The weights in a folder of HuggingFace: safetensors alone, never pickles."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import UsageError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsFolder:
    """Reads one weight at a time from `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Attributes:
        names: of all weights.

    Raises:
        UsageError: neither is there, or a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: self._open(name) for name in {*self._shards().values()}}
        self._file_of = {name: file for file, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118
        self.names = frozenset(self._file_of)

    def _shards(self) -> dict[str, str]:
        if not (self.folder / _INDEX).exists():
            if not (self.folder / _SINGLE).exists():
                pickles = "; pickles such as pytorch_model.bin are not read" if [*self.folder.glob("*.bin")] else ""
                raise UsageError(f"{self.folder}: no {_SINGLE} and no {_INDEX} there{pickles}")
            return {"": _SINGLE}
        try:
            shards = json.loads((self.folder / _INDEX).read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{self.folder / _INDEX}: damaged; copy it again") from None
        for file in {*shards.values()}:
            if Path(file).name != file:
                raise UsageError(f"{self.folder / _INDEX}: names {file}, which is not in the folder")
        return shards

    def _open(self, name: str) -> safe_open:
        try:
            return safe_open(self.folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self.folder / name}: cannot be read ({error}); copy it again") from None

    def read(self, name: str) -> Tensor:
        """One whole weight.

        Raises:
            UsageError: there is none of that name.
        """
        if name not in self._file_of:
            raise UsageError(f"{self.folder}: no weight {name} in its .safetensors files")
        return self._files[self._file_of[name]].get_tensor(name)
