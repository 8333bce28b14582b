"""Convert text to the `.bin/.idx` files that training reads, or check such files.

Each text file is one document, and so is each line of a JSON-lines file. The result is
`<prefix>_<key>_document.bin` and `.idx`, and a `.json` file that names their tokenizer.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.preprocess_data()

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce, ignore_warnings_of_libraries
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.data.documents import TEXT_KEY, Document, find_files, read_documents, texts_of
from megatron.context_parallel.trainer.data.index_file import open_tokens, tokenizer_of
from megatron.context_parallel.trainer.data.tokenizer import TOKENIZERS, build_tokenizer

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


@dataclass
class IndexedOutput:
    """The `.bin/.idx/.json` of one JSON key, under temporary names until `finish`."""

    prefix: str
    dtype: type
    tokens: int = 0
    documents: int = 0
    builder: "IndexedDatasetBuilder" = field(init=False)

    def __post_init__(self) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.builder = IndexedDatasetBuilder(f"{self.prefix}.bin.tmp", dtype=self.dtype)

    def add(self, ids: numpy.ndarray) -> None:
        self.builder.add_document(ids, [len(ids)])
        self.tokens += len(ids)
        self.documents += 1

    def finish(self, tokenizer: dict) -> None:
        self.builder.finalize(f"{self.prefix}.idx.tmp")
        summary = tokenizer | {"documents": self.documents, "tokens": self.tokens}
        Path(f"{self.prefix}.json.tmp").write_text(json.dumps(summary, indent=2) + "\n")
        # The index is removed first and written last: data without an index is rejected, a wrong pair is not.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in ("bin", "json", "idx"):
            os.replace(f"{self.prefix}.{suffix}.tmp", f"{self.prefix}.{suffix}")

    def discard(self) -> None:
        self.builder.data_file.close()
        for suffix in ("bin", "json", "idx"):
            Path(f"{self.prefix}.{suffix}.tmp").unlink(missing_ok=True)


class PreprocessFlags(FlagSection):
    input: list[str] = flag(
        "files and folders; .jsonl and .json files have one JSON object per line, other files are one document; in a "
        "folder, hidden files and .json files are ignored",
        unit="PATH",
        example="my_folder",
        needs="output_prefix",
        excludes="check",
        adds_up=True,
    )
    check: list[str] = flag("check these .bin/.idx files, including every token", unit="PREFIX", excludes="input")
    json_keys: list[str] = flag("keys of the JSON objects to read", derived=TEXT_KEY, unit="KEY")
    output_prefix: str | None = flag("path of the output, without _<key>_document", unit="PREFIX", example="data/mine")
    tokenizer_type: str = flag(
        f"one of {', '.join(sorted(set(TOKENIZERS) - {'NullTokenizer'}))}", "ByteLevelTokenizer", unit="TYPE"
    )
    tokenizer_model: str | None = flag("SentencePiece file or HuggingFace folder", unit="PATH")
    append_eod: bool = flag("append the end-of-document token to every document", False)
    workers: int = flag("number of processes that tokenize", 1)
    log_interval: int = flag("number of documents between progress lines", 1000)


PARSER = FlagParser(
    PreprocessFlags,
    __doc__,
    "--input PATH [PATH ...] --output-prefix PREFIX [flags]",
    ["--input my_folder notes.jsonl --output-prefix data/mine --append-eod", "--check data/mine_text_document"],
)


def read_flags(argv: list[str] | None) -> PreprocessFlags:
    """The complete flags. Raises UsageError for invalid ones."""
    args = PARSER.parse(argv)
    if args.tokenizer_type == "NullTokenizer":
        raise UsageError("--tokenizer-type NullTokenizer: cannot tokenize text; give ByteLevelTokenizer")
    return replace(args, json_keys=args.json_keys or [TEXT_KEY])


class Encoder:
    """Texts of a document, by key, and their token ids; picklable, one per worker process."""

    def __init__(self, args: PreprocessFlags) -> None:
        from megatron.core.datasets.indexed_dataset import DType

        self.args = args
        self.tokenizer = build_tokenizer(args)
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)
        if args.append_eod and self.tokenizer.eod is None:
            raise UsageError(
                f"--append-eod needs an end token, which --tokenizer-model {args.tokenizer_model} lacks; "
                "leave the flag out or give a tokenizer with an eos_token"
            )

    def encode(self, document: Document) -> tuple[dict[str, numpy.ndarray], str | None]:
        """(ids by key, None), or ({}, why the document is skipped)."""
        texts = texts_of(document, self.args.json_keys)
        if isinstance(texts, str):
            return {}, texts
        end = [self.tokenizer.eod] if self.args.append_eod else []
        return {
            key: numpy.array(self.tokenizer.tokenize(text) + end, dtype=self.dtype) for key, text in texts.items()
        }, None


_encoder: Encoder


def _start_worker(encoder_args: PreprocessFlags) -> None:
    global _encoder
    ignore_warnings_of_libraries()
    _encoder = Encoder(encoder_args)


def _encode(document: Document):
    return _encoder.encode(document)


def encode_all(args: PreprocessFlags, encoder: Encoder, documents: Iterator[Document]) -> Iterator:
    """Documents encoded by `args.workers` processes, in order."""
    if args.workers == 1:
        yield from map(encoder.encode, documents)
        return
    with multiprocessing.get_context("spawn").Pool(args.workers, _start_worker, (args,)) as pool:
        yield from pool.imap(_encode, documents, chunksize=16)


def write(
    args: PreprocessFlags, files: list[Path], encoder: Encoder, outputs: dict[str, IndexedOutput]
) -> dict[str, int]:
    """Add every document to its output. Returns the number of skipped documents, by reason."""
    skipped: dict[str, int] = {}
    started = time.monotonic()
    documents = read_documents(files, args.json_keys)
    for count, (ids, reason) in enumerate(encode_all(args, encoder, documents), 1):
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
        for key, array in ids.items():
            outputs[key].add(array)
        if count % args.log_interval == 0:
            tokens = sum(output.tokens for output in outputs.values())
            rate = tokens / (time.monotonic() - started)
            print(f"{count} documents, {tokens} tokens, {rate:.0f} tokens/s", flush=True)
    if not any(output.tokens for output in outputs.values()):
        raise UsageError(f"--input {_named(args.input)}: contains no UTF-8 text; give a file that has some")
    return skipped


def _named(inputs: Sequence[str]) -> str:
    first, *others = inputs
    return f"{first} and {len(others)} more" if others else first


def run(args: PreprocessFlags) -> None:
    files = find_files(args.input)
    announce(f"encoding {_named(args.input)}")  # tokenizers take seconds to import
    encoder = Encoder(args)
    assert args.output_prefix  # --input needs it
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    outputs = {key: IndexedOutput(f"{args.output_prefix}_{key}_document", encoder.dtype) for key in args.json_keys}
    try:
        skipped = write(args, files, encoder, outputs)
        source = {
            "tokenizer_type": args.tokenizer_type,
            "tokenizer_model": args.tokenizer_model,
            "vocab_size": encoder.tokenizer.vocab_size,
        }
        for output in outputs.values():
            output.finish(source)
            print(f"{output.prefix}: {output.documents} documents, {output.tokens} tokens")
    finally:
        for output in outputs.values():
            output.discard()
    if skipped:
        print("skipped " + ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items())))


def check(args: PreprocessFlags) -> None:
    """Print a line for each prefix of `--check`.

    Raises:
        UsageError: some of them cannot be used for training.
    """
    bad = []
    for prefix in args.check:
        try:
            print(f"{prefix}: {_check_prefix(args, prefix)}", flush=True)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            bad.append(f"{prefix}: {reason}")
    if bad:
        raise UsageError(f"--check {'; '.join(bad)}; create these files again with --input")


def _check_prefix(args: PreprocessFlags, prefix: str) -> str:
    """A summary of the data. Raises ValueError if it cannot be used for training."""
    data = open_tokens(prefix)
    made_by = tokenizer_of(prefix)
    kind = made_by.get("tokenizer_type", args.tokenizer_type)
    vocabulary = made_by["vocab_size"] if made_by else build_tokenizer(args).vocab_size
    if wrong := data.wrong_token(vocabulary):
        index, token = wrong
        where = f"at index {index}, in sequence {data.sequence_at(index)}"
        raise ValueError(f"token {token} {where}, is not one of the {vocabulary} of {kind}")
    return f"{len(data.lengths)} sequences, {len(data.tokens)} tokens, all of them among the {vocabulary} of {kind}"


def main(argv: list[str] | None = None) -> None:
    ignore_warnings_of_libraries()
    try:
        args = read_flags(argv)
        if args.check:
            check(args)
        else:
            run(args)
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}; give readable --input files and an "
            "--output-prefix in a writable folder"
        ) from None
