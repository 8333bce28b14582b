"""Generation: sampling, text, scheduling, and that other requests never change a text."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import tokenizers
import torch
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams
from transformers import PreTrainedTokenizerFast

from megatron.context_parallel import UsageError
from megatron.context_parallel.commands import generate as command
from megatron.context_parallel.commands.gpu_checks.common import synchronisations
from megatron.context_parallel.inference import sampling
from megatron.context_parallel.inference.change_logits import TextSoFar, change_logits
from megatron.context_parallel.inference.engine import OVERTAKE, Engine, Request, RequestOutput
from megatron.context_parallel.inference.faults import MISTAKE, GrammarFault
from megatron.context_parallel.inference.prefixes import BLOCK, Prefixes, Prompt
from megatron.context_parallel.inference.prompt_scores import score_prompt
from megatron.context_parallel.inference.rank_loop import RankLoop
from megatron.context_parallel.inference.rules import Rules
from megatron.context_parallel.inference.sampling import Draw, Token, choose_tokens
from megatron.context_parallel.inference.text_stream import TextStream
from megatron.context_parallel.inference.token_bytes import pieces_of
from megatron.context_parallel.inference.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from tests.support import llama_case
from tests.support.draws_case import CASES, LOGITS, choose_token, shares
from tests.support.plain_session import PlainSession
from tests.support.pretended_gpu import GPU, pretended_gpu

# -------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(("params", "expected"), CASES)
def test_draws_have_the_probabilities_of_the_model(params, expected):
    """A campaign draws more, within 0.01."""
    assert shares(1000, 7, **params) == pytest.approx(expected, abs=0.04)


def test_greedy_takes_the_first_of_the_likeliest_and_tells_probabilities_of_the_model():
    logits = torch.tensor([1.0, 4.0, 4.0, 0.0])
    assert math.isnan(choose_token(logits, SamplingParams(top_k=1), 0, 5).logprob)  # nobody asked
    for params in (SamplingParams(top_k=1, return_log_probs=True), SamplingParams(temperature=0.0, top_n_logprobs=3)):
        token = choose_token(logits, params, 0, 5)
        assert token.id == 1 and token.logprob == pytest.approx(logits.double().log_softmax(0)[1].item())
    assert [pair[0] for pair in token.top] == [1, 2, 0]
    cold = choose_token(logits, SamplingParams(temperature=0.01, top_k=2, return_log_probs=True), 0, 5)
    assert cold.logprob == pytest.approx(logits.double().log_softmax(0)[1].item())


def test_draws_depend_on_seed_and_position():
    def draws(seed: int) -> list[int]:
        return [choose_token(torch.zeros(1000), SamplingParams(), seed, at).id for at in range(20)]

    assert draws(1) == draws(1) and len({*draws(1)}) > 15
    assert sum(a == b for a, b in zip(draws(1), draws(2), strict=True)) < 3


def test_the_host_reads_the_tokens_of_a_gpu_at_once():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    ways = {"temperature": 0.0}, {"temperature": 0.9}, {"top_p": 0.8, "top_n_logprobs": 2}, {"return_log_probs": True}
    rules = Rules(5, logit_bias=[(3, 1.5)], presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.5)
    texts = TextSoFar([1], [7, 7, 9], frozenset([4])), TextSoFar([1], [], frozenset([4]), torch.arange(50) % 2 == 0)
    changes = None, *(partial(change_logits, rules=rules, so_far=text) for text in texts), None
    asked = [Draw(SamplingParams(**params), 5, 2, 0.01, change) for params, change in zip(ways, changes, strict=True)]
    expected = choose_tokens([*rows], asked)
    with pretended_gpu(), synchronisations(GPU) as waits:
        there = to_device(rows, GPU)
        assert [*map(repr, choose_tokens([*there], asked))] == [*map(repr, expected)] and waits() == 1


def test_the_host_reads_the_scores_of_a_prompt_on_a_gpu_at_once():
    def score(logits: torch.Tensor) -> list[Token]:
        session = PlainSession(None, 200, 50)
        session.scored = {0: ([*range(10, 110)], logits)}
        return score_prompt(session, 0, tokens, 12, 100, 2)

    tokens = torch.randint(50, (110,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(2))
    found, by_definition = score(logits), logits.double().log_softmax(-1)[2:90]
    expected = by_definition[range(88), tokens[13:101]].tolist()
    assert [token.logprob for token in found] == pytest.approx(expected)
    assert [token.top[1][0] for token in found] == by_definition.topk(2).indices[:, 1].tolist()
    with pretended_gpu(), synchronisations(GPU) as waits:
        assert score(to_device(logits, GPU)) == found and waits() == 1


def test_a_logit_that_is_no_number_chooses_nothing_and_others_do_not_notice():
    rows = [torch.tensor(row) for row in ([0.0, math.nan], [0.0, 1.0], [math.inf, 0.0], [-math.inf, -math.inf])]
    asked = Draw(SamplingParams(top_k=1), 0, 4)
    tokens = choose_tokens(rows, [asked] * 4)
    # As texts: a logprob that is no number does not equal itself.
    assert str(tokens[1]) == str(choose_token(rows[1], *asked[:3])) and tokens[1].id == 1
    assert [type(token) for token in tokens] == [FloatingPointError, Token, FloatingPointError, FloatingPointError]


def test_no_temperature_is_too_small_and_none_reaches_beyond_top_k():
    for temperature in (5e-324, 1e-310, 1e-300, 1e-5, 1.7e308):
        for limits in ({}, {"top_k": 2}, {"top_k": 10**30}, {"top_p": 1e-320}):
            for logits in (LOGITS, LOGITS * 1e30, LOGITS - 1000):
                params = SamplingParams(temperature=temperature, **limits)
                drawn = {choose_token(logits, params, 7, at).id for at in range(30)}
                assert drawn <= ({2} if temperature < 1 else {2, 3} if limits.get("top_k") == 2 else {0, 1, 2, 3})


def test_a_draw_at_the_end_of_the_sum_is_a_token_that_can_come(monkeypatch):
    # The sum of the probabilities rounds: what lies below it may round to it.
    monkeypatch.setattr(sampling, "_uniform", lambda seed, position: 1.0)
    assert choose_token(LOGITS, SamplingParams(), 0, 0).id == 3
    assert choose_token(LOGITS, SamplingParams(top_k=3), 0, 0).id == 1


@pytest.mark.parametrize(
    ("limits", "again"),  # and how many of 40 rows need all tokens
    [
        ({"top_k": 3}, range(1, 20)),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.8, "top_k": 64}, range(40)),
        ({"top_p": 0.99}, range(1, 40)),
        ({"top_k": 9}, [40]),
        ({"top_k": 30, "top_p": 0.5}, [40]),
    ],
)
def test_draws_from_the_likeliest_tokens_are_those_from_all(limits, again, monkeypatch):
    """Also where tokens have equal logits, and where the likeliest are not enough."""
    torch.manual_seed(0)
    rows = torch.randn(40, 64).mul(2).round().unbind()  # about 12 different logits
    asked = [Draw(SamplingParams(temperature=0.8, **limits), 3, at, min_p=0.01 * (at % 2)) for at in range(40)]
    calls, draw = [], sampling._draw
    monkeypatch.setattr(sampling, "_draw", lambda *args: calls.append((len(args[0]), args[2])) or draw(*args))
    of_all, of_eight = [], []
    for most, found in ((64, of_all), (8, of_eight)):
        monkeypatch.setattr(sampling, "SORTED", most)
        found += [token.id for token in choose_tokens(rows, asked)]
    assert of_eight == of_all and len({*of_all}) > 5
    assert calls[:2] == [(40, 64), (40, 8)] and sum(count for count, _ in calls[2:]) in again


def ruled(rules: Rules, prompt=(), text=(), ends=(), allowed=None, logits=LOGITS) -> list[float]:
    so_far = TextSoFar(prompt, text, frozenset(ends), allowed)
    return change_logits(logits.double(), rules, so_far).tolist()


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (Rules(ignore_ends=True, min_p=0.5), True),
        (Rules(min_tokens=1), True),
        (Rules(min_tokens=2), False),
        (Rules(presence_penalty=1.0), False),
        (Rules(frequency_penalty=-1.0), False),
        (Rules(repetition_penalty=2.0), False),
        (Rules(logit_bias=[(2, 1.0)]), False),
    ],
)
def test_rules_that_keep_logits_change_none(rules, kept):
    """After a text of one token."""
    assert rules.keep_logits(1) == kept == (ruled(rules, text=[1], ends=[3]) == LOGITS.tolist())


def test_rules_change_logits_as_defined():
    assert ruled(Rules()) == LOGITS.tolist()
    penalties = Rules(presence_penalty=0.5, frequency_penalty=0.25)
    assert ruled(penalties, prompt=[0, 2], text=[1, 3, 3]) == [0.0, 0.25, 3.0, 1.0, -math.inf]
    old = torch.tensor([0.0, 1.0, 3.0, -2.0])
    assert ruled(Rules(repetition_penalty=2.0), prompt=[0, 2], text=[3], logits=old) == [0.0, 1.0, 1.5, -4.0]
    assert max(ruled(Rules(repetition_penalty=5e-324), prompt=[2, 3])) == torch.finfo(torch.float64).max
    assert ruled(Rules(logit_bias=[(0, 9.0), (2, -100.0)])) == [9.0, 1.0, -97.0, 2.0, -math.inf]
    # The bias is added before penalties, as vLLM does.
    assert ruled(Rules(logit_bias=[(1, 3.0)], repetition_penalty=2.0), text=[1])[1] == 2.0
    assert ruled(Rules(min_tokens=2), text=[0], ends=[1, 9]) == [0.0, -math.inf, 3.0, 2.0, -math.inf]
    assert ruled(Rules(min_tokens=2), text=[0, 0], ends=[1]) == LOGITS.tolist()
    only = torch.tensor([False, True, False, False, False])
    assert ruled(Rules(min_tokens=2), ends=[1], allowed=only)[:3] == [-math.inf, 1.0, -math.inf]
    with pytest.raises(GrammarFault):
        ruled(Rules(), allowed=GrammarFault())
    complete = TextSoFar([], [], frozenset([1]), only)
    nothing, excluded = (TextSoFar([], [], frozenset(), torch.arange(5) == end) for end in (5, 4))
    changes = [partial(change_logits, rules=Rules(min_tokens=2), so_far=text) for text in (nothing, excluded, complete)]
    tokens = choose_tokens([LOGITS] * 3, [Draw(SamplingParams(), 0, 0, change=change) for change in changes])
    assert [type(token) for token in tokens] == [GrammarFault, GrammarFault, Token] and tokens[2].id == 1


def test_min_p_leaves_out_what_is_far_less_likely_than_the_best():
    two = LOGITS[2:4].softmax(0).tolist()
    draws = [choose_tokens([LOGITS], [Draw(SamplingParams(), 7, at, 0.3)])[0].id for at in range(2000)]
    assert {*draws} == {2, 3} and draws.count(2) / 2000 == pytest.approx(two[0], abs=0.03)  # exp(-1) > 0.3 > exp(-2)


def test_changed_logits_choose_and_the_model_s_are_told():
    bias = Draw(SamplingParams(temperature=0.0, top_n_logprobs=2), 0, 0, change=lambda row: row + torch.eye(5)[1] * 9)
    token, plain = choose_tokens([LOGITS, LOGITS], [bias, Draw(SamplingParams(top_k=1), 0, 0)])
    assert (token.id, plain.id) == (1, 2) and token.logprob == pytest.approx(LOGITS.double().log_softmax(0)[1].item())
    assert [number for number, _ in token.top] == [2, 3]


def test_a_token_that_the_model_excludes_is_not_told():
    assert len(choose_token(LOGITS, SamplingParams(top_k=1, top_n_logprobs=5), 0, 0).top) == 4


# ------------------------------------------------------------------------------------------------------ text


def pieces(text: bytes, stop: tuple[str, ...] = (), prompt: bytes = b"") -> tuple[list[str], TextStream]:
    """The text after each byte, and at the end."""
    stream = TextStream(ByteTokenizer(256).decode, stop, prompt)
    out = [stream.push(token) for token in text]
    return [*out, stream.finish()], stream


def test_text_never_splits_a_character_and_loses_none():
    text = "aé€😀 \ufffd\n  z "
    out, _ = pieces(text.encode(), prompt="😀".encode())
    assert "".join(out) == text
    assert [piece for piece in out if piece][:5] == ["a", "é", "€", "😀", " "]
    for prompt, text, found in (
        (b"a\xe2\x82", b"\xacb", "€b"), (b"a\xe2", b"", ""), (b"a\xe2", b"b\xe2", "b\ufffd"),
        ("a\ufffd".encode(), "\ufffdé".encode(), "\ufffdé"),
    ):  # fmt: skip
        assert "".join(pieces(text, prompt=prompt)[0]) == found  # a character that the prompt begins
    broken, _ = pieces(b"a\xf0\x9f\x80b\xe2\x82")
    assert "".join(broken) == b"a\xf0\x9f\x80b\xe2\x82".decode(errors="replace")


@pytest.mark.parametrize("decoder", [tokenizers.decoders.Metaspace(), tokenizers.decoders.Strip(" ", 1, 0)])
def test_words_behind_special_tokens_keep_their_spaces(decoder):
    """These decoders take the space from the first word of what they decode."""
    words = {"<s>": 0, "\u2581a": 1, "\u2581": 2, "b": 3}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="b"))
    parts = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Fuse(), decoder]
    library.decoder = decoder if "Metaspace" in str(decoder) else tokenizers.decoders.Sequence(parts)
    fast = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>")
    decode = partial(fast.decode, skip_special_tokens=True)
    for before, text in product([[0], [1, 3], [3, 0]], product(words.values(), repeat=4)):
        stream = TextStream(decode, (), before)
        found = "".join([*map(stream.push, text), stream.finish()])
        assert decode(before) + found == decode([*before, *text]), (before, text)


def test_text_ends_before_the_first_stop_string():
    for stop in (("END",), ("\n\n", "END"), ("ENDING", "END", "ND!")):
        out, stream = pieces(b"one EN ENEND two END", stop)
        assert "".join(out) == "one EN EN" and stream.stopped
        assert all("E" not in piece or piece == "EN " for piece in out[:6])
    out, stream = pieces("one € EN".encode(), ("END", "€€"))
    assert "".join(out) == "one € EN" and not stream.stopped


def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path):
    llama_case.save_tokenizer(tmp_path, chat=False)
    letters, text = HuggingFaceTokenizer(str(tmp_path), special=True), "a é€😀\n"
    tokens = letters.encode(text)
    assert b"".join([letters.pieces[token] for token in tokens]) == text.encode() and letters.pieces[tokens[0]] == b""
    assert ByteTokenizer(256).pieces[195] == b"\xc3"
    words = {"<unk>": 0, "<s>": 1, "\u2581a": 2, "<0xE2>": 3, "b": 4}  # as SentencePiece's
    library = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    parts = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    library.decoder = tokenizers.decoders.Sequence(parts)
    spoken = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", unk_token="<unk>")
    assert pieces_of(spoken) == [b"", b"", b" a", b"\xe2", b"b"]


# -------------------------------------------------------------------------------------------------- prefixes


def test_prefixes_are_found_to_the_token_within_one_key():
    index, text = Prefixes(), list(range(3 * BLOCK))
    remembered = Prompt("a", [*text, 0])

    def match(key: str, tokens: list[int]) -> tuple[int, int] | None:
        found = index.longest(Prompt(key, [*tokens, 0]))
        if (key, tokens) == ("a", text):
            assert index.longest(remembered) == found
        return found

    index.add(1, "a", text, 2 * BLOCK + 5)
    index.add(2, "a", [*text[:BLOCK], 7], BLOCK + 1)
    assert match("a", text) == (1, 2 * BLOCK + 5)
    assert match("a", [*text[: BLOCK + 3], 99]) == (1, BLOCK + 3)
    assert match("a", [*text[:BLOCK], 7, 8]) == (2, BLOCK + 1)
    assert match("a", text[: BLOCK - 1]) is None
    assert match("b", text) is None
    index.add(1, "a", text, 3 * BLOCK)
    assert match("a", text) == (1, 3 * BLOCK)
    assert match("a", text[2 * BLOCK :]) is None  # no beginning, though a sequence has it
    index.remove(1)
    assert match("a", text) == (2, BLOCK)
    index.remove(2)
    assert match("a", text) is None and not index._holders


# ---------------------------------------------------------------------------------------------------- engine


class Letters:
    """A character for each token; token 2 ends a text."""

    ends = frozenset([2])
    has_chat = False
    pieces = [chr(256 + token).encode() for token in range(400)]

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return [ord(character) - 256 for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(256 + token) for token in tokens)


def prompt(length: int, seed: int = 0) -> list[int]:
    numbers = torch.randint(3, llama_case.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return numbers.tolist()


def request(name: str, tokens: list[int], new: int, key: str = "", seed: int = 0, **params) -> Request:
    return Request(name, tokens, SamplingParams(num_tokens_to_generate=new, **params), seed, key)


def finished(engine: Engine, *requests: Request) -> dict[str, list[RequestOutput]]:
    """The outputs of each request; the later ones join one after the other, every second step."""
    outputs: dict[str, list[RequestOutput]] = {}
    later = list(requests)
    for step in range(10_000):
        if later and step % 2 == 0:
            engine.add(later.pop(0))
        for output in engine.step():
            outputs.setdefault(output.request, []).append(output)
        if engine.idle and not later:
            return outputs
    raise AssertionError("it does not end")


def ids(outputs: list[RequestOutput]) -> list[int]:
    return [token.id for output in outputs for token in output.tokens]


def tokens_of(folder, step_tokens: int, cache: int, requests: list[Request], turns: int = 1) -> tuple[dict, list]:
    """Tokens by request on one rank, and how many tokens each step had of each sequence."""
    _, _, model = llama_case.load_llama(folder)
    session = PlainSession(model, cache, llama_case.VOCABULARY)
    engine = Engine(session, Letters(), step_tokens)
    found = {}
    for turn in range(turns):
        for name, outputs in finished(engine, *(r for r in requests if int(r.name[0]) == turn)).items():
            assert outputs[-1].finish and not any(output.finish for output in outputs[:-1])
            assert "".join(o.text for o in outputs) == Letters().decode([t for t in ids(outputs) if t != 2])
            found[name] = ids(outputs), outputs[0].reused, outputs[-1].finish
    parallel_state.destroy_model_parallel()
    return found, session.steps


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A HuggingFace folder, and its model in transformers."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, llama_case.save_llama(folder, "llama3")


def test_greedy_text_is_that_of_transformers_whoever_comes_and_goes(ranks, llama):
    folder, theirs = llama
    requests = [request(f"0{i}", prompt(n, i), 24, top_k=1) for i, n in enumerate((1, 70, 5, 33))]
    ((found, steps),) = ranks(1, tokens_of, folder, 16, 200, requests)
    for asked in requests:
        (expected,) = theirs.generate(
            torch.tensor([asked.tokens]), do_sample=False, max_new_tokens=24, eos_token_id=[2], pad_token_id=0
        )
        assert found[asked.name][0] == expected[len(asked.tokens) :].tolist()
    assert max(map(len, steps)) >= 2
    # The long prompt was computed in parts beside running texts, with at most 16 prompt tokens per step.
    assert any({1, 16} <= {*step.values()} for step in steps)
    most = 0
    for step in steps:
        most = max(most, sum(n for n in step.values() if n > 1))
    assert most == 16


def test_what_is_drawn_does_not_depend_on_neighbours(ranks, llama):
    folder, _ = llama
    one = request("0one", prompt(20), 30, temperature=1.5, top_k=40, top_p=0.9, seed=11)
    others = [request(f"0{i}", prompt(3 * i + 1, i), 9 * i, temperature=2.0, seed=i) for i in range(1, 4)]
    ((alone, _),) = ranks(1, tokens_of, folder, 64, 500, [one])
    ((among, _),) = ranks(1, tokens_of, folder, 5, 120, [others[0], one, *others[1:]])
    assert among["0one"] == alone["0one"] and len({*alone["0one"][0]}) > 10


def test_turns_go_on_in_the_cache_and_keys_keep_theirs_apart(ranks, llama):
    folder, _ = llama
    first = prompt(40)
    ((found, _),) = ranks(1, tokens_of, folder, 512, 400, [request("0", first, 8, key="a", top_k=1)])
    whole = [*first, *found["0"][0]]
    turns = [
        request("0", first, 8, key="a", top_k=1),
        request("1", [*whole, *prompt(6, 1)], 8, key="a", top_k=1),
        request("2 fork", [*first, *prompt(9, 2)], 8, key="a", top_k=1),
        request("3 other", [*first, *prompt(9, 2)], 8, key="b", top_k=1),
    ]
    ((found, steps),) = ranks(1, tokens_of, folder, 512, 400, turns, 4)
    # The last token of a text is not in the cache: a turn starts with it.
    assert [found[r.name][1] for r in turns] == [0, len(whole) - 1, len(first), 0]
    assert [step for step in steps if max(step.values()) > 1] == [{1: 40}, {1: 7}, {2: 9}, {3: 49}]
    assert found["2 fork"][0] == found["3 other"][0]


class Fixed:
    """A session whose logits depend only on the number of tokens, for tests that need no model."""

    def __init__(self, cache_tokens: int) -> None:
        self.session = PlainSession(self.logits, cache_tokens, llama_case.VOCABULARY)

    def logits(self, tokens, positions, mask, runtime_gather_output):
        return torch.nn.functional.one_hot(torch.tensor([[10 + tokens.shape[1] % 50]]), 101) * 9.0


def test_end_tokens_and_stop_strings_wait_or_do_not_count():
    def text(rules: Rules, prompt_length: int = 38, **params) -> tuple[list[int], str]:
        asked = replace(request("a", prompt(prompt_length), 12, top_k=1, **params), rules=rules)
        outputs = finished(Engine(Fixed(1000).session, Letters(), 512), asked)["a"]
        return ids(outputs), outputs[-1].finish

    said = [*range(48, 60)]
    assert text(Rules()) == (said, "length")
    stop = [chr(256 + 50)]
    assert text(Rules(), stop_words=stop) == (said[:3], "stop")
    assert text(Rules(min_tokens=2), stop_words=stop) == (said[:3], "stop")
    assert text(Rules(min_tokens=3), stop_words=stop) == (said, "length")
    ended = Rules(logit_bias=[(2, 9.5)])  # the end is the likeliest token
    assert text(ended) == ([2], "stop")
    assert text(Rules(min_tokens=3, logit_bias=[(2, 9.5)])) == ([*said[:3], 2], "stop")
    assert text(Rules(ignore_ends=True, logit_bias=[(2, 9.5)])) == ([2] * 12, "length")
    anything = json.dumps({"grammars": [{"lark_grammar": "start: /(.|\\n)*/"}]})
    ruled = Rules(ignore_ends=True, min_tokens=3, logit_bias=[(2, 9.5)], grammar=anything)
    assert text(ruled) == ([*said[:3], 2], "stop")  # behind an end token the grammar allows nothing


def test_the_tokens_of_a_prompt_are_scored_however_it_is_cut():
    said = [3, *range(11, 40)]  # the likeliest tokens
    said[7:9] = [5, 6]
    found = []
    for step_tokens in (1, 5, 512):
        engine = Engine(Fixed(1000).session, Letters(), step_tokens)
        finished(engine, request("before", said, 3, top_k=1))  # its cache is not used
        asked = replace(request("a", said, 0, top_n_logprobs=2), scored=True)
        (output,) = finished(engine, asked)["a"]
        assert output.finish == "length" and not output.tokens and engine.idle
        found.append(output.prompt)
    expected = torch.nn.functional.one_hot(torch.arange(11, 41) % 101, 101).double() * 9.0
    logprobs = expected.log_softmax(-1)
    told = found[0]
    assert [token.id for token in told] == said[1:] and found[0] == found[1] == found[2]
    for place, token in enumerate(told):
        assert token.logprob == pytest.approx(logprobs[place, token.id].item(), abs=1e-12)
        assert token.top[0] == (place + 11, pytest.approx(logprobs[place, place + 11].item()))


def test_what_is_kept_is_forgotten_when_weights_change():
    engine = Engine(Fixed(200).session, Letters(), 512)
    for name, reused in (("a", 0), ("b", 39), ("c", 0)):
        if name == "c":
            engine.forget()
            assert engine.cache.room() == engine.capacity
        outputs = finished(engine, request(name, prompt(40), 3, top_k=1))[name]
        assert outputs[0].reused == reused
    engine.add(request("d", prompt(40), 3))
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests have not ended"):
        engine.forget()


def test_requests_wait_for_room_and_old_sequences_make_it():
    session = Fixed(100).session
    engine = Engine(session, Letters(), 512)
    outputs = finished(engine, *(request(str(i), prompt(30, i), 11, key="k", top_k=1) for i in range(4)))
    assert all(len(ids(outputs[str(i)])) == 11 for i in range(4))
    assert max(map(len, session.steps)) == 2  # 40 tokens each: a third would not fit
    # The cached sequence begins like the prompt, but both together do not fit: it goes.
    alike = request("long", [*prompt(30, 3)[:20], *prompt(70, 9)], 10, key="k", top_k=1)
    long = finished(engine, alike)["long"]
    assert len(ids(long)) == 10 and not any(output.reused for output in long)
    with pytest.raises(UsageError, match="90 tokens and 12 new ones: more than 100; give at most 10 new tokens"):
        engine.add(request("more", prompt(90), 12))
    with pytest.raises(UsageError, match="give a prompt below 100 tokens"):
        engine.add(request("more", prompt(100), 1))
    with pytest.raises(UsageError, match="no tokens"):
        engine.add(request("none", [], 1))
    engine.check([0, 100], 1)
    with pytest.raises(UsageError, match="token 101; the vocabulary is 0 to 100"):
        engine.add(request("unknown", [5, 101], 1))


def test_a_short_prompt_overtakes_a_long_one():
    session = Fixed(1000).session
    engine = Engine(session, Letters(), 20)
    outputs: list[RequestOutput] = []
    engine.add(request("long", prompt(300), 2, top_k=1))
    engine.step()
    engine.add(request("short", prompt(20, 1), 2, top_k=1))
    while not any(output.finish for output in outputs):
        outputs += engine.step()
    assert outputs[-1].request == "short" and len(session.steps) == 4


def test_requests_that_fit_overtake_one_that_does_not_a_few_times():
    engine = Engine(Fixed(100).session, Letters(), 512)
    engine.add(request("running", prompt(30), 40, top_k=1))
    engine.step()
    engine.add(request("large", prompt(60, 1), 10, top_k=1))
    for i in range(OVERTAKE + 4):
        engine.add(request(str(i), prompt(4, 2 + i), 2, top_k=1))
    first = [output.request for _ in range(70) for output in engine.step() if output.first]
    assert first[:OVERTAKE] == [str(i) for i in range(OVERTAKE)]
    assert first[OVERTAKE] == "large" and len(first) == OVERTAKE + 5


def test_texts_of_one_prompt_compute_it_once_and_others_do_not_wait():
    session = Fixed(1000).session
    engine = Engine(session, Letters(), 20)
    first = request("first", prompt(50), 4, top_k=1)
    twins = [replace(first, name=name, twin="first") for name in "ab"]
    for one in (first, *twins, request("c", prompt(3), 2, top_k=1)):
        engine.add(one)
    outputs = finished(engine)
    assert [sum(step.values()) for step in session.steps] == [20, 21, 13, 3, 3, 3, 2]  # 50 + 3, and 1 of each twin
    texts = [ids(outputs[name]) for name in ("first", "a", "b")]
    assert texts[0] == texts[1] == texts[2] and [outputs[name][0].reused for name in ("first", "a")] == [0, 49]
    engine.add(first)
    engine.add(twins[0])
    engine.step()
    engine.cancel("first")
    assert len(ids(finished(engine)["a"])) == 4  # it goes on alone


def test_a_waiting_prompt_is_hashed_once(monkeypatch):
    session = Fixed(100).session
    engine = Engine(session, Letters(), 512)
    hashed = []
    monkeypatch.setattr(Prompt, "next_hash", lambda prompt, of=Prompt.next_hash: hashed.append(prompt) or of(prompt))
    engine.add(request("running", prompt(50), 40, key="k", top_k=1))
    engine.step()
    engine.add(request("waiting", [*prompt(50), *prompt(30, 1)], 10, key="k", top_k=1))
    finished(engine)
    assert [one.count for one in hashed] == [49] + [79] * 4  # until a block that is not cached


def test_who_is_cancelled_leaves_at_once_and_the_others_do_not_notice():
    session = Fixed(100).session
    engine = Engine(session, Letters(), 512)
    for name in ("running", "stays", "waiting"):
        engine.add(request(name, prompt(30, len(name)), 15, key=name, top_k=1))
    engine.step()
    for name in ("running", "waiting", "nobody"):
        engine.cancel(name)
    outputs = [output for _ in range(20) for output in engine.step()]
    assert [o.request for o in outputs if o.finish == "cancelled"] == ["running", "waiting"]
    assert len(ids([o for o in outputs if o.request == "stays"])) == 14 and engine.idle
    assert not engine.running and not engine.waiting


def test_of_who_is_cancelled_before_anything_is_cached_nothing_is_kept():
    engine = Engine(Fixed(1000).session, Letters(), chunks=1)
    for name, length in (("first", 30), ("second", 3)):  # a step has a token for the longer one alone
        engine.add(request(name, prompt(length), 2, top_k=1))
    engine.step()
    assert [run.cached for run in engine.running.values()] == [1, 0]
    engine.cancel("second")
    assert [*engine._prefixes._cached] == [engine.running["first"].sequence]


def test_a_logit_that_is_no_number_ends_one_text():
    session = Fixed(100).session

    def logits(tokens, positions, mask, runtime_gather_output):
        found = torch.zeros(1, 1, 101)
        found[..., 9] = math.nan if tokens.shape[1] == 12 else 1.0
        return found

    session.model = logits
    engine = Engine(session, Letters(), 512)
    good = request("good", prompt(30, 1), 9, top_k=1, top_n_logprobs=2)
    outputs = finished(engine, request("bad", prompt(9), 9, top_k=1), good)
    assert ids(outputs["bad"]) == [9] * 3 and [o.finish for o in outputs["bad"]][-1] == "error"
    assert ids(outputs["good"]) == [9] * 9 and outputs["good"][-1].finish == "length"
    assert {*session.sequences} == {*engine._reusable} and len(engine._reusable) == 1


class Fragile(Letters):
    """Has no text for token 57."""

    def decode(self, tokens: list[int]) -> str:
        if 57 in tokens:
            raise LookupError("secret")
        return super().decode(tokens)


def test_an_error_of_one_request_ends_that_one(caplog):
    session = Fixed(400).session
    loop = RankLoop(Engine(session, Fragile(), 512))
    good = [request(f"good{i}", [3 + i] * 20, 9, top_k=1) for i in range(2)]
    bad = [
        request("in its prompt", [5, 57], 9, top_k=1),
        request("in its text", [6] * 45, 9, top_k=1),  # 55 follows, then 56 and 57
        request("in sampling", [7] * 5, 9, top_k="many"),
        request("too long", [7] * 500, 9, top_k=1),
        request("unknown", [500], 9, top_k=1),
    ]
    outputs: dict[str, list[RequestOutput]] = {}
    arriving = [good[0], *bad, good[1]]
    while arriving or not loop.engine.idle:
        for output in loop.turn(arriving):
            outputs.setdefault(output.request, []).append(output)
        arriving = []
    for asked in good:
        assert ids(outputs[asked.name]) == [*range(30, 39)] and outputs[asked.name][-1].finish == "length"
    whys = {asked.name: outputs[asked.name][-1].why for asked in bad}
    assert {outputs[name][-1].finish for name in whys} == {"error"}
    assert [*whys.values()][:3] == [MISTAKE] * 3 and "token 500" in whys["unknown"] and "500 tokens" in whys["too long"]
    assert ids(outputs["in its text"]) == [55, 56]
    assert {*session.sequences} == {*loop.engine._reusable} and len(loop.engine._reusable) == 2
    lines = [json.loads(record.message) for record in caplog.records]
    assert {line["id"]: line["error"] for line in lines} == {
        "in its prompt": "LookupError",
        "in its text": "LookupError",
        "in sampling": "ValueError",
    }
    assert all("test_generate.py" in line["at"][-1] or "sampling.py" in line["at"][-1] for line in lines)
    assert "secret" not in caplog.text


def test_a_rank_with_other_tokens_than_rank_0_stops(monkeypatch):
    loop = loop_of()
    loop.turn([request("one", prompt(5), 2, top_k=1)])
    loop._group, sent = object(), [torch.tensor([0, loop._chosen]), torch.tensor([0, loop._chosen])]
    monkeypatch.setattr("torch.distributed.broadcast", lambda here, source, group: here.copy_(sent.pop(0)))
    with pytest.raises(RuntimeError, match="generated other tokens than rank 0"):
        loop.follow()  # the second turn has another token
    assert not sent and loop.engine.idle


def test_the_watch_hears_of_turns_and_that_rank_0_may_idle():
    session, seen = Fixed(400).session, []
    logits = session.model
    session.model = lambda *args, **how: seen.append(recorder.position) or logits(*args, **how)
    engine = Engine(session, Letters(), 512)
    engine.warm_up()
    assert [*session.steps[0].values(), *session.steps[1].values()] == [2, 1] and not session.sequences
    loop = RankLoop(engine)
    assert (recorder.position.phase, recorder.position.iteration) == ("idle", 2) and recorder.position.done
    loop.turn([request("one", prompt(5), 2, top_k=1)])
    assert (seen[-1].phase, seen[-1].iteration, recorder.position.phase) == ("forward", 2, "idle")
    loop.turn()
    assert (seen[-1].phase, seen[-1].iteration) == ("forward", 3)


def test_the_first_grammar_finds_the_vocabulary_read(monkeypatch):
    pytest.importorskip("llguidance")
    engine = Engine(Fixed(400).session, ByteTokenizer(100), 512)
    engine.warm_up()
    monkeypatch.setattr("llguidance.LLTokenizer", None)
    matcher = engine._grammars.matcher(json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]}))
    assert matcher.allowed().nonzero().tolist() == [[97]]


def test_a_text_ends_at_end_tokens_and_stop_strings():
    engine = Engine(Fixed(100).session, Letters(), 512)
    after = Letters().decode([10 + 7, 10 + 8])
    outputs = finished(engine, request("stop", prompt(5), 30, top_k=1, stop_words=[after]))["stop"]
    assert ids(outputs) == [15, 16, 17, 18] and outputs[-1].finish == "stop"
    assert "".join(output.text for output in outputs) == Letters().decode([15, 16])
    Letters.ends, before = frozenset([16]), Letters.ends
    outputs = finished(engine, request("end", prompt(5), 30, top_k=1))["end"]
    Letters.ends = before
    assert ids(outputs) == [15, 16] and outputs[-1].finish == "stop"
    assert "".join(output.text for output in outputs) == Letters().decode([15])


# --------------------------------------------------------------------------------------------------- command


def loop_of(cache: int = 200) -> RankLoop:
    return RankLoop(Engine(Fixed(cache).session, Letters(), 512))


def letters(*tokens: int) -> str:
    return Letters().decode([*tokens])


def test_what_the_command_prints(capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"{letters(5, 6)}\n\n{letters(7)}\n")
    given = ["--load", "x", "--prompts-file", f"{tmp_path}/prompts.txt", "--max-new-tokens", "3", "--temperature", "0"]
    flags = command.read_flags([*given, "--logprobs"])
    loop, prompts = loop_of(), command.read_prompts(flags)
    command.write_all(flags, loop, prompts, command.requests_of(flags, loop.engine, prompts))
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[5]] == [f"--- prompt {i} of 2: {x!r}" for i, x in ((1, letters(5, 6)), (2, letters(7)))]
    assert [lines[1], lines[6]] == [letters(5, 6, 12, 13, 14), letters(7, 11, 12, 13)]
    assert [line.split()[1:] for line in lines[2:5]] == [[str(i), repr(letters(i))] for i in (12, 13, 14)]
    assert all(float(line.split()[0]) == pytest.approx(-0.0123, abs=1e-4) for line in lines[2:5])
    with pytest.raises(UsageError, match="give at most 197 new tokens"):
        command.requests_of(
            command.read_flags([*given[:4], "--max-new-tokens", "198"]), loop.engine, [letters(1, 1, 1)]
        )
    (tmp_path / "prompts.txt").write_bytes("a\u2028b\fc\r\n\n d".encode())
    assert command.read_prompts(flags) == ["a\u2028b\fc", " d"]


def test_a_conversation_goes_on_in_the_cache(capsys, monkeypatch):
    said = iter([letters(*[9] * 20), letters(8), letters(*[7] * 200)])
    monkeypatch.setattr("builtins.input", lambda mark: next(said))
    flags = command.read_flags(["--load", "x", "--interactive", "--max-new-tokens", "3", "--top-k", "1"])
    loop = loop_of()
    command.converse(flags, loop)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [letters(30, 31, 32), letters(34, 35, 36)] and "the conversation ends here" in lines[2]
    # 20 tokens, two of the three of the answer; then the third and one more.
    assert [sum(step.values()) for step in loop.engine.cache.steps] == [20, 1, 1, 2, 1, 1]


class Begun(Letters):
    """Token 1 comes before each prompt."""

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return ([1] if special is None else []) + super().encode(text)


def test_a_conversation_begins_once(capsys, monkeypatch):
    said = iter([letters(9, 9), letters(8), letters(*[7] * 200)])
    monkeypatch.setattr("builtins.input", lambda mark: next(said))
    flags = command.read_flags(["--load", "x", "--interactive", "--max-new-tokens", "2", "--top-k", "1"])
    loop = RankLoop(Engine(Fixed(200).session, Begun(), 512))
    command.converse(flags, loop)
    assert [*loop.engine.cache.sequences.values()][-1] == [1, 9, 9, 13, 14, 8, 16]
