"""The tokenizers of `--tokenizer-type`. megatron-core builds them from local files; nothing is downloaded."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches import release_of
from megatron.context_parallel.trainer.config.flags import TOKENIZERS, Flags

BYTES = 256


@dataclass(frozen=True)
class TokenIds:
    """What megatron-core's datasets read of a tokenizer, but for its padding token.

    Their samples are never filled up. They would replace every token of the text that is the padding token, and exclude
    it from the loss.
    """

    eod: int | None
    vocab_size: int
    unique_identifiers: dict[str, Any]  # for the cache


class NamesTokenizer(Protocol):
    """Flags that name a tokenizer. NullTokenizer also needs `vocab_size`."""

    @property
    def tokenizer_type(self) -> str: ...

    @property
    def tokenizer_model(self) -> str | None: ...


def build_tokenizer(args: NamesTokenizer):
    """The megatron-core tokenizer named by `args.tokenizer_type`.

    Reads `tokenizer_type`, `tokenizer_model` (a file for SentencePiece, a folder for HuggingFace) and, for
    NullTokenizer only, `vocab_size`. The result has `tokenize(text) -> list[int]`, `detokenize(ids)`,
    `vocab_size` and `eod` (None if the tokenizer has no end-of-document token). ByteLevelTokenizer maps a
    text to its UTF-8 bytes, 0 to 255, and has `eod` 256.

    Raises UsageError for an unknown type, a missing or unreadable tokenizer file, or a package not installed.
    """
    if args.tokenizer_type not in TOKENIZERS:
        raise UsageError(f"--tokenizer-type {args.tokenizer_type}: unknown; use one of {', '.join(TOKENIZERS)}")
    library, package = TOKENIZERS[args.tokenizer_type]
    options = {}
    if library == "byte-level":
        # No padding id: by default it is a byte.
        options = {"special_tokens": ["<eod>"], "vocab_size": BYTES, "_eos_id": BYTES, "_pad_id": -1}
    elif library == "null":
        library, options = _null(_null_vocabulary(getattr(args, "vocab_size", None)))
    else:
        _check_files(args, library, package)
        options = {"use_fast": True} if library == "huggingface" else {}
    return _load(args, library, options)


def vocabulary(args: Flags) -> tuple[int, int | None]:
    """The vocabulary size of that tokenizer, and its `eod`. If it has files, they are read.

    Raises:
        UsageError: as `build_tokenizer` does.
    """
    library, _ = TOKENIZERS[args.tokenizer_type]
    if library == "byte-level":
        return BYTES + 1, BYTES
    if library == "null":
        size = _null_vocabulary(args.vocab_size)
        return size + 1, size
    tokenizer = build_tokenizer(args)
    return tokenizer.vocab_size, tokenizer.eod


def tokenizer_files(folder: str) -> list[Path]:
    """The files of a HuggingFace folder that a tokenizer and its chat template may be made of, sorted."""
    return [path for path in sorted(Path(folder).iterdir()) if path.suffix in (".json", ".jinja", ".model", ".txt")]


def _null_vocabulary(size: int | None) -> int:
    if not size or size < 1:
        what = "missing" if size is None else f"{size} are too few"
        needs = "with --tokenizer-type NullTokenizer give the number of token ids in the data"
        raise UsageError(f"--vocab-size: {what}; {needs}, such as --vocab-size 32000")
    return size


def _null(size: int) -> tuple[str, dict[str, object]]:
    """megatron-core's name and options for a tokenizer of `size` ids and an end-of-document token after them."""
    import megatron.core

    release = release_of(megatron.core.__version__)
    if release < (0, 17):
        return "null", {"vocab_size": size}
    # Since 0.18 the end-of-document token is one of `vocab_size` ids, the last one.
    return "null-text", {"vocab_size": size + (release >= (0, 18))}


def _check_files(args: NamesTokenizer, library: str, package: str | None) -> None:
    model, given = args.tokenizer_model, f"--tokenizer-type {args.tokenizer_type}"
    if library == "huggingface":
        found, wanted = bool(model and Path(model).is_dir()), "folder that contains tokenizer.json"
    else:
        found, wanted = Path(model or "").is_file(), "file such as path/to/tokenizer.model"
    if not found:
        raise UsageError(f"--tokenizer-model {model}: not found for {given}; give a {wanted}")
    if package and importlib.util.find_spec(package) is None:
        why = f"the package {package} is not installed; pip install {package}"
        raise UsageError(f"{given}: {why}, or give --tokenizer-type ByteLevelTokenizer")


def _load(args: NamesTokenizer, library: str, options: dict):
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported, below
    from megatron.core.tokenizers import MegatronTokenizer

    try:
        return MegatronTokenizer.from_pretrained(
            tokenizer_path=args.tokenizer_model, metadata_path={"library": library}, **options
        )
    except Exception as error:
        if library in ("byte-level", "null", "null-text"):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--tokenizer-model {args.tokenizer_model}: cannot be read as a {args.tokenizer_type} ({reason}); "
            "give a tokenizer of that type, or use --tokenizer-type ByteLevelTokenizer"
        ) from error
