"""Reads documents from text files and JSON-lines files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.context_parallel.errors import UsageError

TEXT_KEY = "text"


@dataclass(frozen=True)
class Document:
    """The location of a text: a whole file, or one line of a JSON-lines file (number from 1)."""

    path: Path
    line: bytes | None = None
    number: int = 0


def find_files(inputs: list[str]) -> list[Path]:
    """The given files, and the files in the given folders, sorted inside each folder."""
    files = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            for inside in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in inside.relative_to(path).parts)
                if not hidden and inside.suffix != ".json" and inside.is_file():
                    files.append(inside)
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"--input {name} does not exist; give a file or a folder of text or .jsonl files")
    return files


def read_documents(files: list[Path], keys: list[str]) -> Iterator[Document]:
    for path in files:
        if path.suffix in (".jsonl", ".json"):
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    yield Document(path, line, number)
        elif keys == [TEXT_KEY]:
            yield Document(path)
        else:
            raise UsageError(
                f"--json-keys {' '.join(keys)} does not fit the plain text file {path}; use --json-keys text"
            )


def texts_of(document: Document, keys: list[str]) -> dict[str, str] | str:
    """The text under each key, or why the document has none. The text of a whole file is under `TEXT_KEY`.

    Raises:
        UsageError: a line is not an object with text under these keys.
    """
    data = document.path.read_bytes() if document.line is None else document.line
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if document.line is None:
        texts = {TEXT_KEY: text}
    elif text.strip():
        texts = _fields(document, text, keys)
    else:
        return "empty"
    return texts if all(texts.values()) else "empty"


def _fields(document: Document, line: str, keys: list[str]) -> dict[str, str]:
    place = f"--input {document.path} line {document.number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f'{place} is not JSON ({error.msg}); write one object per line, {{"text": "..."}}') from None
    except RecursionError:
        raise UsageError(f'{place} is nested too deeply; write one object per line, {{"text": "..."}}') from None
    for key in keys:
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            found = f"it has {', '.join(record)}" if isinstance(record, dict) else "it is not an object"
            raise UsageError(f"{place} has no text under the key {key} ({found}); give one of its keys to --json-keys")
    return {key: record[key] for key in keys}
