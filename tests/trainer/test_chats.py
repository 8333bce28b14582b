"""Chats to packed samples: the loss is on the answers alone, no chat is cut, and ranks do not change it."""

import json
import time
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoTokenizer

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.resume import same_data
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.data.batches import build_data_iterator
from megatron.context_parallel.trainer.data.best_fit import best_fit
from megatron.context_parallel.trainer.data.chat_template import ChatTemplate
from megatron.context_parallel.trainer.data.chats import Chat, read_chats
from tests.support import training_case
from tests.support.case_args import CaseArgs
from tests.support.chat_case import CHATML, MARKED, PLAIN, VOCABULARY, chat, tokenizer, write
from tests.support.data_case import EOD, SEQUENCE, arguments, corpus, datasets

CP = "context_parallel_size"
DIALOG = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi\n"},
    {"role": "assistant", "content": "Hé <|im_start|>llo  "},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]

# ---- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_and_their_end_tokens_are_learned_and_nothing_else(tmp_path, template):
    folder = tokenizer(tmp_path, template)
    tokens = AutoTokenizer.from_pretrained(folder)
    (found,) = ChatTemplate(folder).tokens_of([Chat("here", DIALOG)])
    ids, answers = found
    assert (ids.dtype, answers.dtype) == (numpy.int32, bool)
    assert ids.tolist() == tokens.apply_chat_template(DIALOG)["input_ids"]
    assert tokens.decode(ids[answers]) == "Hé <|im_start|>llo  <|im_end|>Ciao<|im_end|>"
    starts = numpy.flatnonzero(numpy.diff(answers.astype(int)) == 1) + 1
    assert [tokens.decode(ids[:start])[-10:] for start in starts] == ["assistant\n"] * 2


def test_a_template_without_special_tokens_has_its_newline_learned(tmp_path):
    folder = tokenizer(tmp_path, PLAIN.replace("}}: ", "}}:") + "{% if add_generation_prompt %}assistant:{% endif %}")
    ((ids, answers),) = ChatTemplate(folder).tokens_of([Chat("here", DIALOG[1:])])
    assert AutoTokenizer.from_pretrained(folder).decode(ids[answers]) == "Hé <|im_start|>llo  \nCiao\n"


SHORTENED = CHATML.replace("message.content", "(message.content if loop.last else message.content[:1])")
ONE_MARKED = MARKED.replace('message.role == "assistant"', 'message.role == "assistant" and loop.last')
TEMPLATES = {
    "merged white space": (CHATML, chat("Hi", "\nHello"), "reaches across the beginning or the end of an answer"),
    "an answer that changes": (SHORTENED, chat("Hi", "Hello", "So", "Long"), "up to message 2 is not the beginning"),
    "no prompt": (PLAIN, chat("Hi", "Hello"), "message 2 does not begin with its content"),
    "a marker less": (ONE_MARKED, chat("Hi", "Hello", "So", "Long"), "marks 1 of 2 answers"),
    "a template that fails": ("{{ raise_exception('no tools') }}", chat("Hi", "Hello"), "no tools"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_does_not_fit_is_one_line(tmp_path, name):
    template, wrong, expected = TEMPLATES[name]
    path = write(tmp_path / "chats.jsonl", [chat("Ok", "Ok")] * (name == "merged white space") + [wrong])
    with pytest.raises(UsageError) as caught:
        [*ChatTemplate(tokenizer(tmp_path / "tokenizer", template)).tokens_of(read_chats(path))]
    (line,) = caught.value.args
    assert line.startswith(f"{path} line {1 + (name == 'merged white space')}: ") and expected in line
    assert "\n" not in line


LINES = {
    '{"messages": ': "not JSON",
    '["a"]': "not an object",
    '{"text": "Hi", "id": 1}': "no list under the key messages (it has text, id)",
    '{"messages": []}': "no list under the key messages",
    '{"messages": [1]}': "message 1: not an object",
    '{"messages": [{"role": "bot", "content": "Hi"}]}': 'message 1: role "bot" is unknown; give system, user',
    '{"messages": [{"role": "user", "content": null}]}': "message 1: no text under the key content",
    json.dumps(chat("\ud800")): "message 1: half of a surrogate pair",
    json.dumps(chat("Hi", "")): "message 2: the assistant's answer is empty",
    json.dumps(chat("Hi")): "no answer of the assistant",
    json.dumps({"messages": DIALOG[2:]}): "begins with an answer",
    json.dumps(chat("Hi", "Ho") | {"tools": [1]}): "tools are not supported",
    "\xff": "not UTF-8",
    "[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("wrong", LINES, ids=LINES.values())
def test_a_wrong_line_is_named(tmp_path, wrong):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\n" + json.dumps(chat("Hi", "Ho")).encode() + b"\n" + wrong.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        [*read_chats(str(path))]
    assert str(caught.value).startswith(f"{path} line 3") and LINES[wrong] in str(caught.value)


def test_a_system_message_begins_another_chat(tmp_path):
    two = [*DIALOG, *DIALOG[:3]]
    path = write(tmp_path / "chats.jsonl", [{"messages": two}])
    assert [found.messages for found in read_chats(path)] == [DIALOG, DIALOG[:3]]


# ---- packing ------------------------------------------------------------------------------------


def test_best_fit_puts_each_into_the_fullest_sample_that_holds_it():
    assert best_fit(numpy.array([3, 7, 4, 10, 6, 2, 3, 5]), 10).tolist() == [1, 1, 2, 0, 2, 3, 3, 3]


@pytest.mark.parametrize("capacity", [40, 64])
def test_best_fit_is_that_of_its_definition(capacity):
    rows = numpy.random.default_rng(capacity).integers(1, 41, 300)
    rooms: list[int] = []
    expected = {}
    for piece in sorted(range(len(rows)), key=lambda piece: -rows[piece]):
        fitting = [sample for sample, room in enumerate(rooms) if room >= rows[piece]]
        if not fitting:
            rooms.append(capacity)
        expected[piece] = min(fitting, key=lambda sample: rooms[sample], default=len(rooms) - 1)
        rooms[expected[piece]] -= rows[piece]
    found = best_fit(rows, capacity)
    assert found.max() + 1 == len(rooms)
    assert sorted(numpy.bincount(found, rows)) == sorted(capacity - numpy.array(rooms))


def test_packing_takes_seconds_for_a_million_documents():
    rows = numpy.random.default_rng(0).lognormal(numpy.log(1100), 1.5, 2 * 10**5).astype(int).clip(1, 32768)
    start = time.process_time()
    samples = best_fit(rows, 32768)
    assert time.process_time() - start < 2  # CPU seconds, for a fifth of a million
    filled = numpy.bincount(samples, rows)
    assert filled.max() <= 32768 and filled.mean() > 0.998 * 32768


def chat_arguments(tmp_path, lines: list[dict], **changes):
    made = {"sft": True, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer(tmp_path / "tokenizer")}
    made |= {"data_path": [write(tmp_path / "chats.jsonl", lines)], "split": "100,0,0", "vocabulary": VOCABULARY}
    return arguments(tmp_path, **(made | {"reset_attention_mask": True, "seq_length": 128} | changes))


def parts(sample: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The documents of a sample."""
    of = sample["document_ids"]
    return [{name: values[of == number] for name, values in sample.items()} for number in range(int(of.max()) + 1)]


def test_chats_are_packed_whole_and_long_ones_lose_their_end(tmp_path, capsys):
    lines = [chat(f"Question {number}", f"Answer {number}" * (number % 4)) for number in range(21) if number % 4]
    args = chat_arguments(tmp_path, [*lines, chat("Long", "x" * 200)])
    train = datasets(args, 3 * 16, 0, 0)[0]
    samples = train.per_epoch
    tokens = AutoTokenizer.from_pretrained(args.tokenizer_model)
    texts = []
    rows = 0
    for number in range(samples):
        sample = train[number]
        outside = sample["document_ids"] < 0
        assert {len(values) for values in sample.values()} == {128}
        assert not sample["loss_mask"][outside].any() and not sample["tokens"][outside].any()
        for part in parts(sample):
            rows += len(part["tokens"])
            assert part["position_ids"].tolist() == [*range(len(part["tokens"]))]
            assert (part["tokens"][1:] == part["labels"][:-1]).all()
            texts.append(tokens.decode([part["tokens"][0], *part["labels"]]))
            learned = tokens.decode(part["labels"][part["loss_mask"] > 0])
            assert learned and texts[-1].split("<|im_start|>assistant\n")[1].removesuffix("\n") == learned
    whole = [tokens.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    long = tokens.apply_chat_template(chat("Long", "x" * 200)["messages"], tokenize=True)["input_ids"][:129]
    assert sorted(texts) == sorted([*whole, tokens.decode(long)])
    padding = 1 - rows / (128 * samples)
    expected = (
        f"train data: {samples} samples of 128 tokens from 16 chats of {args.data_path[0]}, {padding:.1%} padding"
    )
    assert f"{expected}, 1 truncated\n" in capsys.readouterr().out


def test_each_epoch_has_every_sample_in_another_order_and_goes_on_where_it_stopped(tmp_path):
    lines = [chat("Q", f"Answer {number}" * (1 + number % 7)) for number in range(60)]
    args = chat_arguments(tmp_path, lines)
    train = datasets(args, 100, 0, 0)[0]
    each = train.per_epoch
    epochs = [[train[each * epoch + number]["labels"].tolist() for number in range(each)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] and each > 8
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    other = datasets(chat_arguments(tmp_path, lines, seed=1), 100, 0, 0)[0]
    assert [other[number]["labels"].tolist() for number in range(each)] != epochs[0]
    longer = datasets(args, 1000, 0, 0)[0]  # the first epochs of a longer run are the same
    assert all((longer[number]["tokens"] == train[number]["tokens"]).all() for number in range(100))
    assert (len(train), len(longer)) == (100, 1000)
    batches = [*build_data_iterator(train, args, 0, 0, 1, print)]
    for number, batch in enumerate(batches):
        starts, ends = batch["documents"].around(torch.arange(128))
        for at, seen in enumerate(ends - starts):
            ids = train[2 * number + at]["document_ids"]
            assert seen.tolist() == [int((ids == own).sum()) if own >= 0 else 0 for own in ids]
    for resumed, batch in zip(build_data_iterator(train, args, 2 * each, 0, 1, print), batches[each:], strict=True):
        assert all((resumed[name] == batch[name]).all() for name in ("tokens", "labels", "loss_mask"))
        assert (resumed["documents"].edges[0] == batch["documents"].edges[0]).all()


def test_documents_of_a_corpus_are_packed_and_long_ones_cut(tmp_path, capsys):
    prefix = corpus(tmp_path)
    args = arguments(tmp_path, data_path=[prefix], split="100,0,0", pack_documents=True)
    train = datasets(args, 10, 0, 0)[0]
    pairs = []
    for number in range(train.per_epoch):
        for part in parts(train[number]):
            assert (part["tokens"] != EOD).all() and part["loss_mask"].all()
            pairs += zip(part["tokens"].tolist(), part["labels"].tolist(), strict=True)
    expected = []
    for ids in train.dataset:
        expected += zip(ids.tolist(), ids[1:].tolist(), strict=False)
    assert sorted(pairs) == sorted(expected)
    assert f"from 40 documents of {prefix}, " in (said := capsys.readouterr().out)
    assert f", {sum(len(ids) > SEQUENCE + 1 for ids in train.dataset)} cut\n" in said


def test_other_chats_or_another_template_are_other_data(tmp_path):
    args = chat_arguments(tmp_path, [chat("Q", "A")], load="run", override_data_order=False)
    before = datasets(args, 1, 0, 0)[0][0]["labels"]
    progress = Progress(consumed_train_samples=10, train_data=same_data(args, Progress()))
    assert same_data(args, progress) == progress.train_data
    template = Path(args.tokenizer_model) / "chat_template.jinja"
    template.write_text(CHATML.replace("{{ message.role }}", "{{ message.role }}:").replace("assistant", "assistant:"))
    assert (datasets(args, 1, 0, 0)[0][0]["labels"] != before).any()  # tokenized anew
    with pytest.raises(UsageError, match="other tokens, by another tokenizer or chat template, than the run in"):
        same_data(args, progress)
    template.write_text(CHATML)
    write(tmp_path / "chats.jsonl", [chat("Q", "B")])
    with pytest.raises(UsageError, match=r"chats.jsonl has other chats than the run in --load run"):
        same_data(args, progress)


# ---- flags --------------------------------------------------------------------------------------

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --dry-run --sft"


def test_flags_of_chats(tmp_path):
    folder = tokenizer(tmp_path / "tokenizer")
    flags = [*SMALL.split(), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder, "--data-path"]
    good = write(tmp_path / "chats.jsonl", [chat("Q", "A")])
    args = parse_args([*flags, good, "--cp-place-documents"])
    assert args.reset_attention_mask and args.reset_position_ids
    wrong = write(tmp_path / "wrong.jsonl", [chat("Q", "A")] * 200 + [chat("Q")])
    for given, expected in (
        ([*flags, wrong], f"{wrong} line 201: a chat has no answer"),
        ([*flags, str(tmp_path / "none.jsonl")], "none.jsonl: cannot be read (No such file or directory)"),
        ([*flags, good, "--pack-documents"], "--sft: cannot be combined with --pack-documents"),
        ([*SMALL.split(), "--data-path", good], "--sft: needs --tokenizer-type HuggingFaceTokenizer"),
        ([*flags, good, "--sft-tokenizer-prompt-format", "identity"], "--sft uses the chat template of"),
    ):
        with pytest.raises(UsageError) as caught:
            parse_args(given)
        assert expected in caught.value.args[0]
    (Path(folder) / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="--sft needs a tokenizer with a chat template"):
        parse_args([*flags, good])


# ---- training -----------------------------------------------------------------------------------


def train_on_chats(args: CaseArgs, changes: dict) -> list[float]:
    """The losses of training on chats from random initial weights."""
    train = datasets(args, 40, 0, 0)[0]
    sizes = {"vocabulary": VOCABULARY, "padded_vocab_size": VOCABULARY, "train_iters": 4, "reset_attention_mask": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_case, "sample", train.__getitem__)
        return training_case.train("llama", **(sizes | changes)).losses


def test_chats_train_as_on_one_rank(ranks, tmp_path):
    lines = [chat("ab"[: 1 + number % 2], "xyz"[: 1 + number % 3]) for number in range(20)]
    template = CHATML.replace("{{ message.role }}\n", "{{ message.role[0] }}").replace("assistant\n", "a")
    args = chat_arguments(tmp_path, lines, seq_length=training_case.SEQUENCE)
    args.tokenizer_model = tokenizer(tmp_path / "short", template)
    (one,) = ranks(1, train_on_chats, args, {})
    for world, changes in ((2, {CP: 2}), (4, {CP: 4, "cp_strategy": "mesh", "cp_place_documents": True})):
        for losses in ranks(world, train_on_chats, args, changes):
            assert losses == pytest.approx(one, rel=1e-5)
    assert one[-1] < 0.9 * one[0]
