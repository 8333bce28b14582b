"""Text to `.bin/.idx` to micro batches: no byte lost, no sample twice, the same order on every layout."""

import json
import re
import runpy
import sys
import time
from argparse import Namespace
from multiprocessing.queues import Queue
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron.context_parallel.commands import preprocess_data
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.data import index_file
from megatron.context_parallel.trainer.data.batches import _received, build_data_iterator
from megatron.context_parallel.trainer.data.index_cache import record
from megatron.context_parallel.trainer.data.tokenizer import build_tokenizer
from megatron.context_parallel.trainer.data.worker_end import prepare_worker
from megatron.context_parallel.trainer.faults.cause import describe_error
from tests.support.data_case import EOD, SEQUENCE, arguments, corpus, datasets, preprocess


def iterate(args: Namespace, consumed: int, dp_rank: int, dp_size: int, notes=None) -> list[dict[str, torch.Tensor]]:
    train, notes = datasets(args, 64, 0, 0)[0], [] if notes is None else notes
    batches = list(build_data_iterator(train, args, consumed, dp_rank, dp_size, notes.append))
    assert all(0 <= batch[name].min() <= batch[name].max() < 257 for batch in batches for name in ("tokens", "labels"))
    return batches


# ---- preprocess_data ----------------------------------------------------------------------------


def test_files_become_documents_of_their_bytes(tmp_path):
    texts = {"a.py": "x = 'é'\r\n", "b/c.txt": "\x00\x01 line\n", "b/d.md": "last"}
    for name, text in texts.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text.encode())
    index = preprocess(tmp_path, "--input", tmp_path / "in")
    assert [bytes(ids.astype(numpy.uint8)) for ids in index] == [text.encode() for text in texts.values()]
    assert index.index.dtype == numpy.uint16
    assert index.document_indices.tolist() == [0, 1, 2, 3]


def test_append_eod_ends_every_document(tmp_path, capsys):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"text": "ab"}\n')
    second.write_text('{"text": "c"}\n')
    index = preprocess(tmp_path, "--input", first, "--append-eod", "--input", second)
    assert f"encoding {first} and 1 more ..." in capsys.readouterr().err.splitlines()
    assert [ids.tolist() for ids in index] == [[97, 98, EOD], [99, EOD]]


def test_json_keys_make_one_output_each(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"title": "T", "body": "long"}\n{"title": "U", "body": "er"}\n')
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out")]
    preprocess_data.main([*flags, "--json-keys", "title", "body"])
    title, body = (IndexedDataset(str(tmp_path / f"out_{key}_document")) for key in ("title", "body"))
    assert [bytes(ids.tolist()) for ids in title] == [b"T", b"U"]
    assert [bytes(ids.tolist()) for ids in body] == [b"long", b"er"]


def test_skipped_files_are_counted_and_the_rest_described(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    (folder / "empty.txt").write_text("")
    (folder / "binary.pyc").write_bytes(b"\xff\xfe")
    (folder / ".hidden").write_text("not for training")
    preprocess(tmp_path, "--input", folder)
    assert "skipped 1 empty, 1 not UTF-8" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out_text_document.json").read_text())
    assert summary == {
        "tokenizer_type": "ByteLevelTokenizer",
        "tokenizer_model": None,
        "vocab_size": 257,
        "documents": 1,
        "tokens": 4,
    }


def test_workers_keep_the_order(tmp_path, monkeypatch):
    methods = []
    fork = preprocess_data.multiprocessing.get_context("fork")  # spawned workers would import everything again
    monkeypatch.setattr(preprocess_data.multiprocessing, "get_context", lambda method: methods.append(method) or fork)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(100)))
    index = preprocess(tmp_path, "--input", tmp_path / "in.jsonl", "--workers", 2)
    assert [bytes(ids.tolist()) for ids in index] == [str(number).encode() for number in range(100)]
    assert methods == ["spawn"]


def test_a_failed_run_leaves_the_earlier_result_alone(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "ab"}\n')
    preprocess(tmp_path, "--input", tmp_path / "in.jsonl")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    (tmp_path / "in.jsonl").write_text('{"text": "other"}\n{"text": \n')
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="line 2 is not JSON"):
        preprocess_data.main(flags)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before


MISTAKES = {
    "no input": (["--output-prefix", "{tmp}/out"], "--input: missing"),
    "input and check": (["--input", "a", "--check", "b"], "--input a: cannot be combined with --check b"),
    "input is nowhere": (["--input", "{tmp}/nowhere"], "--input {tmp}/nowhere"),
    "no text in it": (["--input", "{tmp}/binary"], "{tmp}/binary"),
    "broken JSON": (["--input", "{tmp}/broken.jsonl"], "line 1"),
    "JSON array": (["--input", "{tmp}/array.json"], "not an object"),
    "missing key": (["--input", "{tmp}/good.jsonl", "--json-keys", "body"], "it has text"),
    "keys of plain text": (["--input", "{tmp}/good.txt", "--json-keys", "body"], "--json-keys text"),
    "unknown tokenizer": (["--input", "{tmp}/good.txt", "--tokenizer-type", "BPE"], "ByteLevelTokenizer"),
    "null tokenizer": (["--input", "{tmp}/good.txt", "--tokenizer-type", "NullTokenizer"], "ByteLevel"),
    "no tokenizer file": (
        ["--input", "{tmp}/good.txt", "--tokenizer-type", "SentencePieceTokenizer"],
        "--tokenizer-model None",
    ),
    "bad tokenizer file": (
        [
            "--input",
            "{tmp}/good.txt",
            "--tokenizer-type",
            "Llama2Tokenizer",
            "--tokenizer-model",
            "{tmp}/good.txt",
        ],
        "--tokenizer-model {tmp}/good.txt",
    ),
    "no workers": (["--input", "{tmp}/good.txt", "--workers", "0"], "--workers 0"),
    "output folder is a file": (
        ["--input", "{tmp}/good.txt", "--output-prefix", "{tmp}/good.txt/out"],
        "--output-prefix",
    ),
    "unknown flag": (["--input", "{tmp}/good.txt", "--inputs"], "--inputs"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(tmp_path, name):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "good.jsonl").write_text('{"text": "good"}')
    (tmp_path / "broken.jsonl").write_text("{text}")
    (tmp_path / "array.json").write_text('["text"]')
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    flags, expected = MISTAKES[name]
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    if "--output-prefix" not in flags:
        flags += ["--output-prefix", str(tmp_path / "out")]
    with pytest.raises(UsageError) as caught:
        preprocess_data.main(flags)
    assert any(expected.format(tmp=tmp_path) in line for line in caught.value.args)
    assert not list(tmp_path.glob("out*"))


def test_the_command_itself(tmp_path, monkeypatch, capsys):
    tool = str(Path(__file__).parents[2] / "tools" / "preprocess_data.py")
    monkeypatch.setattr(
        sys, "argv", [tool, "--input", str(tmp_path / "nowhere"), "--output-prefix", str(tmp_path / "out")]
    )
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(tool, run_name="__main__")
    error = capsys.readouterr().err
    assert leaving.value.code == 2
    assert error.count("\n") == 1 and error.startswith("preprocess_data.py: error: --input ")


# ---- tokenizers ---------------------------------------------------------------------------------


def test_bytes_never_collide_with_the_end_token(tmp_path):
    tokenizer = build_tokenizer(arguments(tmp_path))
    text = "".join(map(chr, range(256))) + "é漢🙂"
    assert tokenizer.tokenize(text) == list(text.encode())
    assert tokenizer.detokenize([*text.encode(), EOD]) == text
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, EOD)


def test_huggingface_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "b"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    wrapped.save_pretrained(tmp_path / "words")
    (tmp_path / "in.txt").write_text("a b z a")
    flags = [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        tmp_path / "words",
        "--append-eod",
    ]
    index = preprocess(tmp_path, "--input", tmp_path / "in.txt", *flags)
    assert index[0].tolist() == [2, 3, 0, 2, 1]
    assert json.loads((tmp_path / "out_text_document.json").read_text())["vocab_size"] == 4
    args = arguments(tmp_path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "words"))
    args.__dict__.update(data_path=[str(tmp_path / "out_text_document")], split="100,0,0", seq_length=10)
    sample = datasets(args, 1, 0, 0)[0][0]  # the text twice; its b stays, though it is the padding token
    assert sample["tokens"].tolist() == [2, 3, 0, 2, 1] * 2 and sample["loss_mask"].all()


def test_sentencepiece_file(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = ["the quick brown fox", "jumps over the lazy dog"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "m"), vocab_size=30, minloglevel=2
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    (tmp_path / "in.txt").write_text(lines[0])
    flags = ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", tmp_path / "m.model", "--append-eod"]
    index = preprocess(tmp_path, "--input", tmp_path / "in.txt", *flags)
    assert index[0].tolist() == [*reference.encode(lines[0]), reference.eos_id()]


def test_null_tokenizer_needs_a_vocabulary_size(tmp_path):
    args = arguments(tmp_path, tokenizer_type="NullTokenizer", vocab_size=100)
    tokenizer = build_tokenizer(args)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    with pytest.raises(UsageError, match="--vocab-size: missing; with --tokenizer-type NullTokenizer give"):
        build_tokenizer(arguments(tmp_path, tokenizer_type="NullTokenizer"))


# ---- datasets and iterators ---------------------------------------------------------------------


def test_a_micro_batch_is_a_shifted_pair(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)])
    batch = iterate(args, 0, 0, 1)[0]
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "tokens": ((2, SEQUENCE), torch.int64),
        "labels": ((2, SEQUENCE), torch.int64),
        "loss_mask": ((2, SEQUENCE), torch.float32),
        "position_ids": ((2, SEQUENCE), torch.int64),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["position_ids"], torch.arange(SEQUENCE).expand(2, -1))
    assert batch["loss_mask"].min() == 1


def test_eod_mask_loss_masks_the_end_tokens_only(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)], eod_mask_loss=True)
    for batch in iterate(args, 0, 0, 1):
        assert torch.equal(batch["loss_mask"] == 0, batch["tokens"] == EOD)


def test_resuming_skips_exactly_what_was_consumed(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)])
    whole, rest = iterate(args, 0, 1, 2), iterate(args, 24, 1, 2)
    assert len(whole) - len(rest) == 6
    for key in ("tokens", "labels", "loss_mask"):
        assert all(torch.equal(a[key], b[key]) for a, b in zip(whole[6:], rest, strict=True))
    assert not torch.equal(whole[0]["tokens"], rest[0]["tokens"])


@pytest.mark.parametrize("dp_size", [2, 4])
def test_ranks_share_out_the_samples_of_one_rank(tmp_path, dp_size):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)])
    alone = torch.cat([batch["tokens"] for batch in iterate(args, 8, 0, 1)])
    shares = [iterate(args, 8, rank, dp_size) for rank in range(dp_size)]
    together = torch.cat([batch["tokens"] for batches in zip(*shares, strict=True) for batch in batches])
    assert len(together) >= 56
    assert torch.equal(together, alone[: len(together)])


def test_workers_give_the_same_batches_and_no_random_number_is_drawn(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)])
    state = torch.get_rng_state()
    plain = iterate(args, 0, 0, 1)
    workers = iterate(arguments(tmp_path, data_path=args.data_path, num_workers=2), 0, 0, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(plain, workers, strict=True))


def test_the_loader_makes_the_documents(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)], reset_attention_mask=True, num_workers=1)
    for batch in iterate(args, 32, 0, 1):
        ends = batch["documents"].around(torch.arange(SEQUENCE))[1]
        last = ends == torch.arange(1, SEQUENCE + 1)
        last[:, -1] = batch["tokens"][:, -1] == EOD  # the end of the sample ends a document too
        assert torch.equal(last, batch["tokens"] == EOD)


def test_splits_hold_different_documents(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)])
    train, valid, test = datasets(args, 8, 4, 0)
    assert test is None and len(train) >= 8 and len(valid) >= 4
    assert train.indices.tolist() == list(range(32)) and valid.indices.tolist() == list(range(32, 40))


def test_a_split_of_no_documents_is_refused(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path, documents=1)])
    assert len(datasets(args, 8, 0, 0)[0]) >= 8
    with pytest.raises(UsageError, match=r"--split 80,20,0 .*\(1 documents\) for valid"):
        datasets(args, 8, 4, 0)
    with pytest.raises(UsageError, match="--split 0,100,0"):
        datasets(arguments(tmp_path, data_path=args.data_path, split="0,100,0"), 8, 0, 0)


def test_data_per_split(tmp_path):
    prefix = corpus(tmp_path)
    args = arguments(tmp_path, train_data_path=[prefix], valid_data_path=[prefix], split=None)
    train, valid, test = datasets(args, 8, 4, 4)
    assert train.indices.tolist() == valid.indices.tolist() == list(range(40))
    assert test is None


def lengths_of_files(folder: Path, packed: bool) -> tuple[str, list[list[int]]]:
    """Of two files: the error if too many samples are asked for, and the lengths with and without its weights."""
    prefixes = []
    for documents in (40, 10):
        (part := folder / str(documents)).mkdir()
        prefixes.append(corpus(part, documents))
    args = arguments(folder, data_path=prefixes, pack_documents=packed)
    lengths = [[len(data) for data in datasets(args, 20, 4, 0)[:2]]]
    with pytest.raises(UsageError) as refused:
        datasets(args, 20, 400, 0)
    args.data_path = str(refused.value).split("; give --data-path ")[1].split()
    assert args.data_path[1::2] == prefixes and int(args.data_path[0]) > int(args.data_path[2])
    return str(refused.value), [*lengths, [len(data) for data in datasets(args, 20, 400, 0)[:2]]]


@pytest.mark.parametrize("packed", [False, True])
def test_files_without_weights_are_read_once(tmp_path, ranks, packed):
    error, (once, weighted) = ranks(1, lengths_of_files, tmp_path, packed)[0]
    assert once == [20, 4] and weighted[0] >= 20 and weighted[1] >= 400
    assert re.match(r"--data-path \S+ \S+: .* gives \d\d of 400 samples for valid;", error)


def test_replaced_data_does_not_meet_the_old_cache(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path, documents=40)], split="100,0,0")
    assert datasets(args, 8, 0, 0)[0].document_index.max() == 39
    corpus(tmp_path, documents=10)
    assert datasets(args, 8, 0, 0)[0].document_index.max() == 9


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--data-path is missing"):
        datasets(arguments(tmp_path), 8, 0, 0)


def with_wrong_token(tmp_path, token: int, place: int) -> str:
    """A prefix of int32 tokens that holds `token` at `place`."""
    tokens = numpy.arange(4000, dtype=numpy.int32) % 257
    tokens[place] = token
    builder = IndexedDatasetBuilder(str(tmp_path / "wrong.bin"), dtype=numpy.int32)
    for part in numpy.split(tokens, 10):
        builder.add_document(part, [len(part)])
    builder.finalize(str(tmp_path / "wrong.idx"))
    return str(tmp_path / "wrong")


def _notes(args: Namespace) -> list[str]:
    notes: list[str] = []
    iterate(args, 0, 0, 1, notes)
    return notes


@pytest.mark.parametrize("token", [257, -5, 2**31 - 1])
def test_a_token_beyond_the_vocabulary_is_named_with_file_and_sample(tmp_path, token):
    prefix = with_wrong_token(tmp_path, token, 2345)
    args = arguments(tmp_path, data_path=[prefix], split="100,0,0")
    note = _notes(args)[0]
    number = int(note.split("sample ")[1].split()[0])
    assert note.startswith(f"{prefix}: sample {number} has token {token}, but the vocabulary has 257 tokens; ")
    sample = datasets(args, 64, 0, 0)[0][number]
    assert token in sample["tokens"].tolist() + sample["labels"].tolist()


def test_a_token_beyond_the_vocabulary_in_a_blend(tmp_path, ranks):
    prefix = with_wrong_token(tmp_path, 300, 2345)
    blend = arguments(tmp_path, data_path=["1", corpus(tmp_path), "3", prefix], split="100,0,0")
    notes = ranks(1, _notes, blend)[0]
    assert notes[0].startswith(f"{prefix}: sample ") and "has token 300, but the vocabulary has 257 tokens" in notes[0]


def test_check_looks_at_every_token(tmp_path, capsys):
    good = corpus(tmp_path)
    preprocess_data.main(["--check", good])
    assert capsys.readouterr().out.endswith(
        f"{good}: 40 sequences, 1560 tokens, all of them among the 257 of ByteLevelTokenizer\n"
    )
    wrong = with_wrong_token(tmp_path, 257, 2345)
    with pytest.raises(UsageError) as caught:
        preprocess_data.main(["--check", wrong, good, str(tmp_path / "missing")])
    assert f"{wrong}: token 257 at index 2345, in sequence 5, is not one of the 257 of Byte" in str(caught.value)
    assert f"{tmp_path}/missing: No such file" in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr().out.startswith(good)


def _overwrite(path: Path, offset: int, value: int, size: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + size] = value.to_bytes(size, "little", signed=True)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "value", "size", "says"),
    [
        (34 + 4 * 3, -7, 4, "declares -7 tokens for sequence 3: damaged"),
        (
            34 + 4 * 10 + 8 * 4,
            6404,
            8,
            "declares that sequence 4 begins at byte 6404, but the one before it ends at 6400: damaged",
        ),
        (
            34 + 4 * 10,
            -1600,
            8,
            "declares that sequence 0 begins at byte -1600, but the one before it ends at 0: damaged",
        ),
        (34 + 12 * 10, 1, 8, "the document bounds go from 1 to 10; they must increase from 0 to the 10 sequences"),
        (34 + 12 * 10 + 8 * 10, 11, 8, "the document bounds go from 0 to 11; they"),
        (34 + 12 * 10 + 8 * 5, 9, 8, "the document bounds go from 0 to 10, and decrease in between; they"),
        (17, 7, 1, "declares float32 numbers, which are not token ids"),
    ],
)
def test_an_index_that_contradicts_itself(tmp_path, monkeypatch, offset, value, size, says):
    prefix = with_wrong_token(tmp_path, 5, 0)
    monkeypatch.setattr(index_file, "_AT_ONCE", 3)
    assert len(index_file.open_tokens(prefix).tokens) == 4000
    _overwrite(tmp_path / "wrong.idx", offset, value, size)
    with pytest.raises(ValueError, match=re.escape(f"wrong.idx{':' if says.startswith('the') else ''} {says}")):
        index_file.open_tokens(prefix)


# ---- the cache of sample indices ----------------------------------------------------------------


DAMAGE = {
    "cut short": lambda data: data[:-8],
    "empty": lambda data: b"",
    "garbage": lambda data: b"garbage" * 50,
    "one bit": lambda data: data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_made_again(tmp_path, capsys, kind):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)], split="100,0,0")
    before = iterate(args, 0, 0, 1)
    files = {path: path.read_bytes() for path in (tmp_path / "cache").glob("*/*.npy")}
    assert len(files) == 3
    iterate(args, 0, 0, 1)
    assert "rebuilding" not in capsys.readouterr().out
    for path, data in files.items():
        path.write_bytes(DAMAGE[kind](data))
        after = iterate(args, 0, 0, 1)
        assert capsys.readouterr().out == f"{path} is truncated or damaged; rebuilding it\n"
        assert path.read_bytes() == data
        assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(before, after, strict=True))


def test_code_in_a_cache_is_not_run(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)], split="100,0,0")
    before = iterate(args, 0, 0, 1)
    (folder,) = (tmp_path / "cache").iterdir()
    path = next(folder.glob("*sample_index.npy"))
    path.write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "ran").encode() + b"\ntR.")  # a pickle
    (folder / "sha256.json").unlink()
    record(folder)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(before, iterate(args, 0, 0, 1), strict=True))
    assert not (tmp_path / "ran").exists()


def test_a_cache_whose_writer_was_killed_is_made_again(tmp_path):
    args = arguments(tmp_path, data_path=[corpus(tmp_path)], split="100,0,0")
    before = iterate(args, 0, 0, 1)
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "sha256.json").unlink()  # it is written last
    path = next(folder.glob("*sample_index.npy"))
    path.write_bytes(path.read_bytes()[:-8])
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(before, iterate(args, 0, 0, 1), strict=True))


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    args = arguments(tmp_path, data_path=[corpus(tmp_path)], data_cache_path=str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"/file.*give a --data-cache-path"):
        datasets(args, 8, 0, 0)


def _blend(args: Namespace) -> list[torch.Tensor]:
    return [batch["tokens"] for batch in iterate(args, 0, 0, 1)]


def test_ranks_build_one_cache_and_see_one_blend(tmp_path, ranks):
    first = corpus(tmp_path)
    (tmp_path / "letters.txt").write_text("abcdefghij" * 400)
    preprocess(tmp_path, "--input", tmp_path / "letters.txt", prefix="letters")
    blend = ["3", first, "1", str(tmp_path / "letters_text_document")]
    one, other = ranks(2, _blend, arguments(tmp_path, data_path=blend, split="100,0,0"))
    assert len(one) == len(other) and all(map(torch.equal, one, other))
    letters = sum(int(sample.min() >= 97) for batch in one for sample in batch)
    assert letters / sum(map(len, one)) == pytest.approx(0.25, abs=0.02)


def test_a_worker_whose_rank_ended_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(Queue, "_on_queue_feeder_error", Queue._on_queue_feeder_error)
    prepare_worker(0)
    for error in (ConnectionResetError("gone"), EOFError(), ValueError("of its own")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: of its own\n"


def test_a_worker_whose_connection_breaks_is_named(monkeypatch):
    """The system reports the end of a killed worker a moment after its connections broke."""

    def broken():
        yield {"tokens": 1}
        raise ConnectionResetError("gone")

    def reported(seconds: float) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(time, "sleep", reported)
    received = _received(broken())
    assert next(received) == {"tokens": 1}
    with pytest.raises(RuntimeError) as error:
        next(received)
    assert describe_error(error.value).startswith("its data worker (process 7) was ended by a signal (Killed)")
