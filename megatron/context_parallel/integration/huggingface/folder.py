"""The weights in a HuggingFace folder: only safetensors, never pickles."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .mxfp4 import unpack

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_ROWS = 4096  # that are compared at a time


class SafetensorsFolder:
    """Reads one weight at a time from `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Attributes:
        names: the names of all weights. One in MXFP4 is in the files as NAME_blocks and NAME_scales.

    Raises:
        UsageError: neither exists, or a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: self._open(name) for name in {*self._shards().values()}}
        self._file_of: dict[str, str] = {}
        for file, opened in self._files.items():
            for name in opened.keys():  # noqa: SIM118
                if (other := self._file_of.setdefault(name, file)) != file:
                    raise UsageError(f"{folder}: {name} is in {other} and in {file}; remove one of the files")
        packed = {name.removesuffix("_blocks") for name in self._file_of if name.endswith("_blocks")}
        halves = {name + half for name in packed for half in ("_blocks", "_scales")}
        self._packed = packed
        self.names = frozenset(self._file_of.keys() - halves | packed)

    def _shards(self) -> dict[str, str]:
        if not (self.folder / _INDEX).exists():
            if not (self.folder / _SINGLE).exists():
                pickles = "; pickles such as pytorch_model.bin are not read" if [*self.folder.glob("*.bin")] else ""
                raise UsageError(f"{self.folder}: contains neither {_SINGLE} nor {_INDEX}{pickles}")
            return {"": _SINGLE}
        try:
            shards = json.loads((self.folder / _INDEX).read_bytes())["weight_map"]
            if not isinstance(shards, dict):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{self.folder / _INDEX}: damaged; copy it again") from None
        for file in shards.values():
            if not isinstance(file, str) or not file.isprintable() or Path(file).name != file:
                raise UsageError(f"{self.folder / _INDEX}: names {file}, which is not in the folder; copy it again")
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
        self.check_has(name)
        return self._files[self._file_of[name]].get_tensor(name)

    def read_row(self, name: str, row: int, rows: int) -> Tensor:
        """Row `row` of a weight of `rows` rows, without reading the others.

        Raises:
            UsageError: there is none of that name, or it has another number of rows.
        """
        if name in self._packed:
            halves = (self.read_row(f"{name}_{half}", row, rows) for half in ("blocks", "scales"))
            return unpack(*halves).t()  # transformers has the transposed weight
        self.check_has(name)
        found = self._files[self._file_of[name]].get_slice(name)
        shape = found.get_shape()
        if not shape or shape[0] != rows:
            raise UsageError(f"{self.folder}: {name} has shape {shape}, and config.json says {rows} rows")
        return found[row]

    def equal(self, name: str, other: str) -> bool:
        """Whether two weights are the same numbers. Some of their rows are in memory at a time."""
        one, two = (self._files[self._file_of[of]].get_slice(of) for of in (name, other))
        if one.get_shape() != two.get_shape():
            return False
        starts = range(0, one.get_shape()[0], _ROWS)
        return all(torch.equal(one[start : start + _ROWS], two[start : start + _ROWS]) for start in starts)

    def check_has(self, name: str) -> None:
        """Reject the name of a weight that does not exist.

        Raises:
            UsageError: there is none of that name.
        """
        if name not in self._file_of and name not in self._packed:
            raise UsageError(f"{self.folder}: no weight {name} in its .safetensors files")


def write_safetensors(folder: Path, weights: Iterable[tuple[str, Tensor]], most_bytes: int) -> None:
    """Write weights, in the order given, to files of at most `most_bytes`, with transformers' file names.

    Only the weights of one file are in memory at a time. A weight larger than `most_bytes` gets a separate file.

    Raises:
        OSError, SafetensorError: writing failed.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def write() -> None:
        save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append([*pending])
        pending.clear()

    for name, weight in weights:
        if pending and size + weight.nbytes > most_bytes:
            write()
            size = 0
        pending[name] = weight.clone(memory_format=torch.contiguous_format)  # safetensors refuses views
        size, total = size + weight.nbytes, total + weight.nbytes
    write()
    files = [_SINGLE]
    if len(shards) > 1:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
