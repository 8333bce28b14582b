"""The `.bin/.idx/.json` files of token ids: what they tell, and whether it can be true."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

_START = 34  # bytes: magic 9, version 8, dtype code 1, sequence count 8, document count 8
_AT_ONCE = 1 << 20  # sequences or tokens looked at in one go, so that memory stays small


@dataclass(frozen=True)
class TokenFile:
    """A pair of files, mapped into memory: `lengths` int32 of its sequences, and all `tokens` one after the other."""

    prefix: str
    lengths: numpy.ndarray
    tokens: numpy.ndarray

    def wrong_token(self, vocabulary: int, most: int | None = None) -> tuple[int, int] | None:
        """(place, token) of the first of all tokens, or of the first `most`, that is not one of 0 to vocabulary - 1."""
        end = min(len(self.tokens), most or len(self.tokens))
        for start in range(0, end, _AT_ONCE):
            part = self.tokens[start : min(start + _AT_ONCE, end)]
            if part.max() >= vocabulary or part.min() < 0:
                at = int(numpy.flatnonzero((part >= vocabulary) | (part < 0))[0])
                return start + at, int(part[at])
        return None

    def sequence_at(self, place: int) -> int:
        """The number of the sequence that holds the token at `place`."""
        return int(numpy.searchsorted(numpy.cumsum(self.lengths, dtype=numpy.int64), place, side="right"))


def open_tokens(prefix: str) -> TokenFile:
    """Open `prefix`.bin and .idx, whose whole index is read and checked, but no token.

    Raises:
        OSError: a file cannot be read.
        ValueError: the index is none, contradicts itself or is not that of the data; the message names the file.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    dtype, sequences, documents = _head(index)
    lengths = numpy.memmap(index, numpy.int32, "r", _START, (sequences,))
    pointers = numpy.memmap(index, numpy.int64, "r", _START + 4 * sequences, (sequences,))
    bounds = numpy.memmap(index, numpy.int64, "r", _START + 12 * sequences, (documents,))
    size = _check_pointers(index.name, lengths, pointers, dtype.itemsize)
    _check_bounds(index.name, bounds, sequences)
    if data.stat().st_size != size:
        raise ValueError(f"{data.name} has {data.stat().st_size} bytes where {index.name} tells of {size}")
    if size == 0:
        raise ValueError(f"{data.name} holds no tokens")
    return TokenFile(prefix, lengths, numpy.memmap(data, dtype, "r"))


def tokenizer_of(prefix: str) -> dict[str, Any]:
    """What the .json beside the data tells: tokenizer_type, tokenizer_model, vocab_size; nothing without one.

    Raises:
        ValueError: it is not the .json that tools/preprocess_data.py writes.
    """
    description = Path(prefix + ".json")
    if not description.is_file():
        return {}
    try:
        made_by = json.loads(description.read_text())
        return {key: made_by[key] for key in ("tokenizer_type", "tokenizer_model", "vocab_size")}
    except (ValueError, KeyError, TypeError, RecursionError):  # the last: brackets in brackets
        raise ValueError(f"{description.name} does not tell of a tokenizer") from None


def _head(index: Path) -> tuple[numpy.dtype, int, int]:
    """Type of the tokens, number of sequences, number of document bounds."""
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
            f"{index.name} has {size} bytes where its {sequences} sequences need {wanted}: cut short or damaged"
        )
    if sequences == 0 or documents == 0:
        raise ValueError(f"{index.name} holds no sequences")
    dtype = numpy.dtype(DType.dtype_from_code(code))
    if dtype.kind not in "iu":
        raise ValueError(f"{index.name} tells of {dtype} numbers, which are no token ids")
    return dtype, sequences, documents


def _check_pointers(name: str, lengths: numpy.ndarray, pointers: numpy.ndarray, itemsize: int) -> int:
    """Refuse sequences that do not begin where those before them end; the bytes of all of them."""
    size = 0
    for start in range(0, len(lengths), _AT_ONCE):
        part = lengths[start : start + _AT_ONCE]
        if part.min() < 0:
            at = int(numpy.argmin(part))
            raise ValueError(f"{name} says that sequence {start + at} has {part[at]} tokens: damaged")
        ends = size + numpy.cumsum(part, dtype=numpy.int64) * itemsize
        begins = numpy.concatenate(([size], ends[:-1]))
        if len(wrong := numpy.flatnonzero(pointers[start : start + _AT_ONCE] != begins)):
            at = int(wrong[0])
            raise ValueError(
                f"{name} says that sequence {start + at} begins at byte {pointers[start + at]}, "
                f"and those before it end at {begins[at]}: damaged"
            )
        size = int(ends[-1])
    return size


def _check_bounds(name: str, bounds: numpy.ndarray, sequences: int) -> None:
    falls = False
    for start in range(0, len(bounds), _AT_ONCE):
        steps = numpy.diff(bounds[start : start + _AT_ONCE + 1])
        falls = falls or bool((steps < 0).any())
    if bounds[0] != 0 or bounds[-1] != sequences or falls:
        why = f"from {bounds[0]} to {bounds[-1]}{', and fall between' if falls else ''}"
        raise ValueError(
            f"{name}: the bounds of its documents go {why}; they must rise from 0 to its {sequences} sequences"
        )
