"""Reads and checks the `.bin/.idx/.json` files of token ids."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

_START = 34  # bytes: magic 9, version 8, dtype code 1, sequence count 8, document count 8
_AT_ONCE = 1 << 20  # sequences or tokens checked at a time, to limit memory


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped pair of files: `lengths` int32 of its sequences, and all `tokens`, concatenated."""

    prefix: str
    lengths: numpy.ndarray
    tokens: numpy.ndarray

    def wrong_token(self, vocabulary: int, most: int | None = None) -> tuple[int, int] | None:
        """(index, token) of the first token outside of 0 to vocabulary - 1; with `most`, only so many are checked."""
        end = min(len(self.tokens), most or len(self.tokens))
        for start in range(0, end, _AT_ONCE):
            part = self.tokens[start : min(start + _AT_ONCE, end)]
            if part.max() >= vocabulary or part.min() < 0:
                at = int(numpy.flatnonzero((part >= vocabulary) | (part < 0))[0])
                return start + at, int(part[at])
        return None

    def sequence_at(self, index: int) -> int:
        """The number of the sequence with the token at index `index`."""
        return int(numpy.searchsorted(numpy.cumsum(self.lengths, dtype=numpy.int64), index, side="right"))


def open_tokens(prefix: str) -> TokenFile:
    """Open `prefix`.bin and .idx. The whole index is read and checked, but no token.

    Raises:
        OSError: a file cannot be read.
        ValueError: the index is invalid, inconsistent, or does not match the data; the message names the file.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    dtype, sequences, documents = _head(index)
    lengths = numpy.memmap(index, numpy.int32, "r", _START, (sequences,))
    pointers = numpy.memmap(index, numpy.int64, "r", _START + 4 * sequences, (sequences,))
    bounds = numpy.memmap(index, numpy.int64, "r", _START + 12 * sequences, (documents,))
    size = _check_pointers(index.name, lengths, pointers, dtype.itemsize)
    _check_bounds(index.name, bounds, sequences)
    if data.stat().st_size != size:
        raise ValueError(f"{data.name} has {data.stat().st_size} bytes, but {index.name} expects {size}")
    if size == 0:
        raise ValueError(f"{data.name} contains no tokens")
    return TokenFile(prefix, lengths, numpy.memmap(data, dtype, "r"))


def tokenizer_of(prefix: str) -> dict[str, Any]:
    """The contents of the .json beside the data: tokenizer_type, tokenizer_model, vocab_size; empty without a .json.

    Raises:
        ValueError: it is not the .json that tools/preprocess_data.py writes.
    """
    description = Path(prefix + ".json")
    if not description.is_file():
        return {}
    try:
        made_by = json.loads(description.read_text())
        return {key: made_by[key] for key in ("tokenizer_type", "tokenizer_model", "vocab_size")}
    except (ValueError, KeyError, TypeError, RecursionError):  # the last: too deep nesting
        raise ValueError(f"{description.name} does not describe a tokenizer") from None


def _head(index: Path) -> tuple[numpy.dtype, int, int]:
    """The dtype of the tokens, the number of sequences, and the number of document bounds."""
    from megatron.core.datasets.indexed_dataset import DType

    from megatron.context_parallel.patches.megatron_index_file import HEADER

    size = index.stat().st_size
    with open(index, "rb") as stream:
        head = stream.read(_START)
    if len(head) < _START or not head.startswith(HEADER):
        raise ValueError(f"{index.name} is not an index of tokens ({size} bytes)")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    if version != 1 or code not in {kind.value for kind in DType}:
        raise ValueError(f"{index.name} has version {version} and token type {code}, not 1 and 1 to 8")
    wanted = _START + 12 * sequences + 8 * documents
    if size != wanted:
        raise ValueError(
            f"{index.name} has {size} bytes, but its {sequences} sequences need {wanted}: truncated or damaged"
        )
    if sequences == 0 or documents == 0:
        raise ValueError(f"{index.name} contains no sequences")
    dtype = numpy.dtype(DType.dtype_from_code(code))
    if dtype.kind not in "iu":
        raise ValueError(f"{index.name} declares {dtype} numbers, which are not token ids")
    return dtype, sequences, documents


def _check_pointers(name: str, lengths: numpy.ndarray, pointers: numpy.ndarray, itemsize: int) -> int:
    """The bytes of all sequences, after a check that each begins where the one before it ends."""
    size = 0
    for start in range(0, len(lengths), _AT_ONCE):
        part = lengths[start : start + _AT_ONCE]
        if part.min() < 0:
            at = int(numpy.argmin(part))
            raise ValueError(f"{name} declares {part[at]} tokens for sequence {start + at}: damaged")
        ends = size + numpy.cumsum(part, dtype=numpy.int64) * itemsize
        begins = numpy.concatenate(([size], ends[:-1]))
        if len(wrong := numpy.flatnonzero(pointers[start : start + _AT_ONCE] != begins)):
            at = int(wrong[0])
            raise ValueError(
                f"{name} declares that sequence {start + at} begins at byte {pointers[start + at]}, "
                f"but the one before it ends at {begins[at]}: damaged"
            )
        size = int(ends[-1])
    return size


def _check_bounds(name: str, bounds: numpy.ndarray, sequences: int) -> None:
    falls = False
    for start in range(0, len(bounds), _AT_ONCE):
        steps = numpy.diff(bounds[start : start + _AT_ONCE + 1])
        falls = falls or bool((steps < 0).any())
    if bounds[0] != 0 or bounds[-1] != sequences or falls:
        why = f"from {bounds[0]} to {bounds[-1]}{', and decrease in between' if falls else ''}"
        raise ValueError(
            f"{name}: the document bounds go {why}; they must increase from 0 to the {sequences} sequences"
        )
