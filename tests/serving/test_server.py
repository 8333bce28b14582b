"""The server with OpenAI's own client: texts, streams, keys, limits, and clients that disconnect."""

import http.client
import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import pytest
import yaml
from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel.inference.engine import Engine, Request, RequestOutput
from megatron.context_parallel.inference.rank_loop import RankLoop
from megatron.context_parallel.inference.rules import Rules
from megatron.context_parallel.inference.sampling import Token
from megatron.context_parallel.inference.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from megatron.context_parallel.integration.vllm.wire import Place, Ticket, digest_of_tokens
from megatron.context_parallel.serving import structured
from megatron.context_parallel.serving.app import Service, Settings
from megatron.context_parallel.serving.fields import IGNORED, NEUTRAL
from megatron.context_parallel.serving.handoff import Tickets
from megatron.context_parallel.serving.listen import bind, serve_in_thread
from megatron.context_parallel.serving.metrics import Metrics
from megatron.context_parallel.serving.protocol import Chat, Completion, Limits, Refused, read
from megatron.context_parallel.serving.reply import Completions
from megatron.context_parallel.serving.token_texts import Offsets, TokenTexts
from megatron.context_parallel.serving.tool_calls import CallReader
from megatron.context_parallel.serving.worker import Worker
from tests.support import llama_case, server_case
from tests.support.chatty import Chatty
from tests.support.handoff_case import Calls
from tests.support.plain_session import PlainSession
from tests.support.server_case import GOOD, JSON, PATIENCE, SAID, TEXT, call, readers_of, serving, wait_until
from tools import make_fields_table

if TYPE_CHECKING:
    import openai  # not by each process that only looks for tests

BOARDS = Path(__file__).parents[2] / "examples" / "serving"


def client(port: int, key: str = "none") -> "openai.OpenAI":
    import openai

    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def server():
    with serving(Chatty) as running:
        yield running


def test_whole_texts_with_counts_and_log_probabilities(server):
    ask = client(server[1]).completions.create
    done = ask(model="parrot", prompt="1234", max_tokens=12, temperature=0, logprobs=2)
    assert done.choices[0].text == "Größe: 12 " and done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (4, 12, 16)
    told = done.choices[0].logprobs
    assert told.token_logprobs == pytest.approx([0.0] * 12, abs=1e-9) and len(told.top_logprobs[0]) == 2
    assert told.tokens[:4] == ["G", "r", "bytes:\\xc3", "bytes:\\xb6"] and told.text_offset[:6] == [0, 1, 2, 2, 3, 3]
    # 0x80 to 0x83 are parts of characters: five tokens are five keys.
    five = ask(model="parrot", prompt="1234", max_tokens=1, temperature=0, logprobs=5).choices[0].logprobs
    assert len(five.top_logprobs[0]) == 5 and five.top_logprobs[0]["G"] == pytest.approx(0, abs=1e-9)
    biased = ask(model="parrot", prompt="1234", max_tokens=1, logprobs=5, logit_bias={"200": 90, "201": 90, "256": 90})
    assert biased.choices[0].text in ("\ufffd", "")
    told = biased.choices[0].logprobs
    assert len(told.top_logprobs[0]) == 6 and [*told.top_logprobs[0]][-1] == told.tokens[0]  # the chosen one besides
    two = ask(model="parrot", prompt=[[49, 50, 51, 52], [1, 2, 3, 4]], n=2, max_tokens=4, stop="r", seed=3)
    assert [(c.index, c.text, c.finish_reason) for c in two.choices] == [(i, "G", "stop") for i in range(4)]
    assert two.usage.prompt_tokens == 8 and two.usage.completion_tokens == 8


def test_streams_have_whole_characters_and_the_counts_at_the_end(server):
    ask = client(server[1])
    chunks = [*ask.completions.create(model="parrot", prompt="1234", max_tokens=17, stream=True, temperature=0)]
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == TEXT and "\ufffd" not in "".join(texts) and len(texts) == 17  # tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    options = {"include_usage": True}
    said = [{"role": "system", "content": "12"}, {"role": "user", "content": [{"type": "text", "text": "34"}]}]
    chunks = [
        *ask.chat.completions.create(
            model="parrot", messages=said, stream=True, stream_options=options, max_completion_tokens=4
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Grö"
    assert chunks[-2].choices[0].finish_reason == "length" and all(chunk.usage is None for chunk in chunks[:-1])
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 4
    whole = ask.chat.completions.create(model="parrot", messages=said, max_tokens=4, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == "Grö" and len(whole.choices[0].logprobs.content) == 4
    told = [(token.token, token.bytes) for token in whole.choices[0].logprobs.content]
    assert told == [("G", [71]), ("r", [114]), ("bytes:\\xc3", [195]), ("bytes:\\xb6", [182])]


def test_tokens_with_the_same_text_keep_their_numbers():
    texts = TokenTexts(["é".encode(), "é".encode(), b"\xc3", b""])
    told = texts.by_text((token, float(token)) for token in range(5))
    assert told == {"é": 0.0, "token_id:1": 1.0, "bytes:\\xc3": 2.0, "token_id:3": 3.0, "token_id:4": 4.0}
    offsets = Offsets()
    assert [offsets.of(piece) for piece in (b"a\xc3", b"\xa9", b"", b"b\xff", b"c")] == [0, 1, 2, 2, 4]


def test_prompts_are_repeated_and_scored(server):
    """As lm-eval's local-completions asks for the likelihood of a text."""
    ask = client(server[1]).completions.create
    body = {"model": "parrot", "prompt": "1234Größe", "temperature": 0, "logprobs": 2, "echo": True}
    scored, continued, again = (ask(**body, max_tokens=new) for new in (0, 1, 1))
    assert scored.choices[0].text == "1234Größe" and scored.choices[0].finish_reason == "length"
    assert scored.usage.completion_tokens == 0 and scored.usage.prompt_tokens == 11
    assert continued == again.model_copy(update={"id": continued.id, "created": continued.created})
    assert continued.choices[0].text == "1234Größe:" and continued.usage.prompt_tokens_details.cached_tokens == 0
    told, longer = scored.choices[0].logprobs, continued.choices[0].logprobs
    assert told.tokens[:5] == ["1", "2", "3", "4", "G"] and told.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8]
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert told.token_logprobs[4:] == pytest.approx([0.0] * 7, abs=1e-9) and told.token_logprobs[1] < -40
    assert longer.tokens == [*told.tokens, ":"]
    assert [len(top) for top in longer.top_logprobs[1:]] == [*[3] * 3, *[2] * 8]  # "2", "3", "4" are unlikely
    assert all(token in top for token, top in zip(longer.tokens[1:], longer.top_logprobs[1:], strict=True))
    chunks = [*ask(**body, max_tokens=2, stream=True)]
    assert [chunk.choices[0].text for chunk in chunks] == ["1234Größe:", " "]
    assert len(chunks[0].choices[0].logprobs.tokens) == 12
    assert ask(model="parrot", prompt="1234", echo=True, max_tokens=2).choices[0].text == "1234Gr"


def test_offsets_are_those_of_a_text_without_its_first_space():
    pieces, prompt = [b"", b" a", b"b"], [0, 1, 2, 1]

    def decode(tokens: list[int]) -> str:
        return b"".join([pieces[token] for token in tokens]).decode().removeprefix(" ")

    request = Request("x-0", prompt, SamplingParams(num_tokens_to_generate=2))
    texts = Completions("x", "parrot", [request], 1, True, decode, TokenTexts(pieces), echo=True)
    texts.add(RequestOutput("x-0", (Token(2),), "b", first=True, prompt=tuple(Token(token) for token in prompt[1:])))
    texts.add(RequestOutput("x-0", (Token(1),), " a", "length"))
    (choice,) = texts.whole()["choices"]
    assert choice["text"] == "ab ab a" and choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 4, 5]


def test_rules_of_a_request_reach_its_text(server):
    ask = client(server[1]).completions.create
    greedy = {"model": "parrot", "prompt": "1234", "temperature": 0}
    assert ask(**greedy, max_tokens=3, logit_bias={"66": 100}).choices[0].text == "BBB"
    ended = {**greedy, "max_tokens": 4, "logit_bias": {"256": 100}}
    assert [ask(**ended, extra_body=more).usage.completion_tokens for more in ({}, {"ignore_eos": True})] == [1, 4]
    waits = ask(**ended, extra_body={"min_tokens": 2}).choices[0]
    assert (waits.text, waits.finish_reason) == ("Gr", "stop")
    once = ask(**greedy, max_tokens=3, logit_bias={"66": 100, "67": 99.5}, presence_penalty=1)
    assert once.choices[0].text == "BCB"
    tokens = {"model": "parrot", "prompt": "Grö"}
    status, _, text = call(server[1], "/tokenize", tokens | {"return_token_strs": True})
    told = json.loads(text)
    assert status == 200 and told["tokens"] == [*"Grö".encode()] and told["count"] == 4
    assert told["max_model_len"] == 1000 and told["token_strs"][2] == "bytes:\\xc3"
    assert json.loads(call(server[1], "/tokenize", {"messages": SAID["messages"]})[2])["tokens"] == [49, 50, 51, 52]
    assert json.loads(call(server[1], "/detokenize", {"tokens": told["tokens"]})[2]) == {"prompt": "Grö"}
    for path, wrong in (("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/detokenize", {"tokens": [300]})):
        assert call(server[1], path, wrong)[0] == 400


def test_tokens_come_with_the_texts(server):
    api = client(server[1])
    how = {"model": "parrot", "temperature": 0, "max_tokens": 2, "extra_body": {"return_token_ids": True}}
    whole = api.completions.create(prompt="12", **how).choices[0]
    assert (whole.prompt_token_ids, whole.token_ids) == ([49, 50], [*whole.text.encode()])
    parts = [chunk.choices[0] for chunk in api.completions.create(prompt="12", stream=True, **how)]
    assert [getattr(part, "prompt_token_ids", None) for part in parts] == [[49, 50], *[None] * (len(parts) - 1)]
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    answer = api.chat.completions.create(messages=SAID["messages"], **how)
    assert answer.prompt_token_ids == [49, 50, 51, 52]
    assert answer.choices[0].token_ids == [*answer.choices[0].message.content.encode()]
    first, *others = api.chat.completions.create(messages=SAID["messages"], stream=True, **how)
    assert first.prompt_token_ids == answer.prompt_token_ids
    streamed = [token for chunk in others for token in chunk.choices[0].token_ids]
    assert streamed == answer.choices[0].token_ids


def test_fields_of_openai_are_known_and_neutral_values_accepted():
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    of_openai = [
        completion_create_params.CompletionCreateParamsStreaming,
        chat_create_params.CompletionCreateParamsStreaming,
    ]
    for kind, params in zip((Completion, Chat), of_openai, strict=True):
        unknown = {*get_type_hints(params)} - kind.model_fields.keys() - NEUTRAL.keys() - IGNORED
        assert not unknown
    limits = Limits("parrot", 1000, 1 << 16)

    def accepted(kind: type, body: dict) -> object:
        return read(kind, json.dumps(body).encode(), Chatty(256), limits)[0]

    for kind, body in ((Completion, GOOD), (Chat, SAID)):
        plain = accepted(kind, body)
        fields = {*kind.model_fields, *NEUTRAL, *IGNORED} - body.keys()
        assert accepted(kind, body | dict.fromkeys(fields)) == plain
        for name, neutral in NEUTRAL.items():
            for value in neutral.values if name not in kind.model_fields else ():
                assert accepted(kind, body | {name: value}) == plain
        rules = {"top_k": -1, "min_tokens": 0, "repetition_penalty": 1.0, "ignore_eos": False, "logit_bias": {}}
        assert accepted(kind, body | rules | {"stop": []}).rules == Rules()
    chat = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    assert accepted(Chat, SAID | chat).rules == Rules() and accepted(Chat, SAID | chat).call_reader() is None
    for name in IGNORED:
        accepted(Chat, SAID | {name: {"any": "value"}})


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_messages_of_every_role_reach_the_template(tmp_path):
    llama_case.save_tokenizer(tmp_path, chat=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{{ m.name }}={{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments.at }}{% endfor %}{{ m.tool_call_id }};{% endfor %}"
        "{{ tools[0].function.name }}{{ mood }}"
    )
    tokenizer = HuggingFaceTokenizer(str(tmp_path), special=True)
    made = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    from openai.types.chat import ChatCompletionMessage

    answer = ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [made]})
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": "Ann"},
        answer.model_dump(),
        {"role": "tool", "content": "blue", "tool_call_id": "1"},
        {"role": "assistant"},
    ]
    body = SAID | {"messages": messages, "tools": [LOOK], "chat_template_kwargs": {"mood": "!"}}
    _, (tokens,) = read(Chat, json.dumps(body).encode(), tokenizer, Limits("parrot", 1000, 1 << 16))
    assert tokenizer.decode(tokens) == "system=be;userAnn=hi;assistant=looksky;tool=blue1;assistant=;look!"
    with pytest.raises(Refused, match="chat_template_kwargs: 'chat_template' is no variable"):
        read(
            Chat,
            json.dumps(SAID | {"chat_template_kwargs": {"chat_template": ""}}).encode(),
            tokenizer,
            Limits("parrot", 9, 999),
        )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello <b>", "Hello <b>", []),
        ('<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>', "", [{"at": "sky"}]),
        ('I <look>.<tool_call>{"name": "look", "arguments": {}}</tool_call>', "I <look>.", [{}]),
        ('{"name": "look", "parameters": {"at": 1}}', "", [{"at": 1}]),
        (
            '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "look", "arguments": {"a": 2}}]',
            "",
            [{}, {"a": 2}],
        ),
        ('{"name": "jump", "parameters": {}}', '{"name": "jump", "parameters": {}}', []),
        ('{"look": [', '{"look": [', []),
        ("<tool_call>nothing", "<tool_call>nothing", []),
        ("", "", []),
    ],
)
def test_calls_of_tools_are_found_in_texts_and_streams(text, content, calls):
    for parts in ([text], [*text]):
        reader = CallReader(["look"])
        pushed = [reader.push(part) for part in parts]
        rest, found = reader.finish()
        assert "".join(pushed) + rest == content and [json.loads(call.arguments) for call in found] == calls
    if content and not calls and content[0] == "H":
        assert pushed[0] == "H" and pushed[6] == "" and pushed[7] == "<b"


def test_a_text_with_a_call_of_a_tool(monkeypatch):
    monkeypatch.setattr(
        server_case, "TEXT", 'Look: <tool_call>{"name": "look", "arguments": {"at": "höher"}}</tool_call>#'
    )
    with serving(Chatty) as (_, port, _):
        ask = {**SAID, "max_tokens": 90, "tools": [LOOK], "tool_choice": "auto", "temperature": 0, "stop": "#"}
        done = client(port).chat.completions.create(**ask).choices[0]
        (made,) = done.message.tool_calls
        assert (made.function.name, made.function.arguments) == ("look", '{"at": "höher"}')
        assert done.finish_reason == "tool_calls" and done.message.content == "Look: "
        chunks = [*client(port).chat.completions.create(**ask, stream=True)]
        assert "".join([chunk.choices[0].delta.content or "" for chunk in chunks]) == "Look: "
        (streamed,) = chunks[-1].choices[0].delta.tool_calls
        assert (streamed.index, streamed.function) == (0, type(streamed.function)(**made.function.model_dump()))
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        plain = client(port).chat.completions.create(**ask | {"tool_choice": "none"}).choices[0]
        assert plain.finish_reason == "stop" and "<tool_call>" in plain.message.content


def test_without_the_library_a_grammar_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(structured, "has_library", lambda: False)
    body = json.dumps(GOOD | {"response_format": {"type": "json_object"}}).encode()
    with pytest.raises(Refused, match="install llguidance where the server runs"):
        read(Completion, body, ByteTokenizer(256), Limits("parrot", 1000, 1 << 16))


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_texts_have_the_form_that_was_asked_for(server):
    pytest.importorskip("llguidance")
    ask, said = client(server[1]), SAID["messages"]

    def text(more: dict, new: int = 30) -> str:
        done = ask.completions.create(model="parrot", prompt="1234", max_tokens=new, temperature=0, extra_body=more)
        return done.choices[0].text if done.choices[0].finish_reason == "stop" else ""

    bias = {"logit_bias": {str(ord(letter)): -90 for letter in " \n\t\r"}}  # the parrot prefers none of them
    assert text({"guided_choice": ["yes", "no"]}) in ("yes", "no")
    assert text({"structured_outputs": {"choice": ["Grün", "Größer"]}}) == "Größer"
    assert re.fullmatch("[0-9]{3}-x", text({"guided_regex": "[0-9]{3}-x"}))
    assert text({"guided_grammar": 'start: "a" "b"'}) == text({"guided_grammar": 'root ::= "a" "b"'}) == "ab"
    ended = bias | {"logit_bias": bias["logit_bias"] | {"34": 60, "125": 95, "256": 99}}
    assert json.loads(text(ended | {"response_format": {"type": "json_object"}})) == {}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert isinstance(json.loads(text(ended | {"response_format": form}))["n"], int)
    assert isinstance(json.loads(text(ended | {"guided_json": SCHEMA}))["n"], int)
    assert text(ended | {"guided_json": SCHEMA}, new=2) == ""  # "length"
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    for choice, finish in (("required", "tool_calls"), ({"type": "function", "function": {"name": "look"}}, "stop")):
        more = {"model": "parrot", "messages": said, "max_tokens": 90, "temperature": 0, "tools": [tool]}
        more |= {"tool_choice": choice, "extra_body": ended}
        if choice == "required":
            more["parallel_tool_calls"] = False
        done = ask.chat.completions.create(**more).choices[0]
        (call_made,) = done.message.tool_calls
        assert done.finish_reason == finish and call_made.function.name == "look" and done.message.content is None
        assert isinstance(json.loads(call_made.function.arguments)["n"], int)
        chunks = [*ask.chat.completions.create(**more, stream=True)]
        (streamed,) = chunks[-1].choices[0].delta.tool_calls
        assert streamed.function == call_made.function.model_copy() or streamed.function.name == "look"
        assert chunks[-1].choices[0].finish_reason == finish
    for wrong in (
        {"guided_regex": "("},
        {"guided_grammar": "start: x"},
        {"guided_json": "{"},
        {"guided_json": {"type": 5}},
        {"response_format": {"type": "json_schema"}},
    ):
        status, _, answer = call(server[1], "/v1/completions", GOOD | wrong)
        assert status == 400 and json.loads(answer)["error"]["message"].endswith("correct it"), answer
    status, _, answer = call(server[1], "/v1/completions", GOOD | {"guided_regex": "a", "guided_choice": ["a"]})
    assert status == 400 and "2 fields say what the text looks like; give one of them" in answer


BAD = [
    (400, "the body is not JSON", b""),
    (400, "the body is not JSON", b"{"),
    (400, "the body is not JSON", b"\xff\xfe"),
    (400, "the body is not JSON", b'{"seed": NaN}'),
    (400, "the body is not an object; send {...}", b"[]"),
    (400, "the body is not an object; send {...}", b"null"),
    (400, "prompt: missing; give a text, a list of tokens, or", {"model": "parrot"}),
    (400, "model: missing; give the name that /v1/models returns", {"prompt": "1234"}),
    (400, 'temperature: "warm" is not supported; give a number from 0 up', GOOD | {"temperature": "warm"}),
    (400, "best_of: 2 is not supported; give n, and choose yourself", GOOD | {"best_of": 2}),
    (400, "colour: unknown field; leave it out", GOOD | {"colour": "red"}),
    (400, "min_tokens: 3 is above max_tokens 2; give at most that", GOOD | {"min_tokens": 3}),
    (400, "logit_bias: token 257; the vocabulary is 0 to 256", GOOD | {"logit_bias": {"257": 1}}),
    (400, "prompt: not supported; give a text", GOOD | {"prompt": ["a", 5]}),
    (400, "prompt: not supported; give a text", GOOD | {"prompt": ["a"] * 129}),
    (400, "prompt[1]: not supported; give a text", GOOD | {"prompt": [[1], []]}),
    (400, "prompt[0]: -1 is not supported; give a text", GOOD | {"prompt": [-1]}),
    (400, "logit_bias: 'x' is no token; give numbers as text", GOOD | {"logit_bias": {"x": 1}}),
    (400, "logit_bias: '065' is no token; give numbers as text", GOOD | {"logit_bias": {"65": 1, "065": 1}}),
    (404, "'other'", GOOD | {"model": "other"}),
    *[
        (400, name, GOOD | {name: value})
        for name, values in {
            "model": [1, None],
            "prompt": [None, 5, [], [[]], [1, "a"], {"a": 1}, [-1], "", [[1], []]],
            "max_tokens": [-1, 1.5, "8", True],
            "temperature": [-0.1, [1]],
            "top_p": [0, 1.1, "all"],
            "top_k": [-2, 0.5],
            "n": [0, 129, "two"],
            "stop": ["", [""], ["a"] * 17, 5, [None]],
            "seed": [1.5, "x", 2**70],
            "stream": ["yes", 1],
            "stream_options": [[], {"include_usage": 1}, {"else": True}],
            "logprobs": [-1, 21, True],
            "echo": ["yes"],
            "suffix": ["end"],
            "presence_penalty": [2.5],
            "frequency_penalty": [-3],
            "repetition_penalty": [0],
            "min_p": [1.5],
            "logit_bias": [{"5": 101}, {"5": "1"}],
            "stop_token_ids": [[5]],
            "response_format": [
                {"type": "xml"},
                {"type": "json_schema", "json_schema": 5},
                {"type": "json_object", "json_schema": {"schema": {}}},
            ],
            "structured_outputs": [{"xml": "a"}, {}],
        }.items()
        for value in values
    ],
    (400, "9 texts at once; request at most 8", GOOD | {"n": 9}),
    (400, "give a prompt below 1000", GOOD | {"prompt": "x" * 1000}),
    (400, "give at most 996 new tokens", GOOD | {"max_tokens": 997}),
    (400, "token 257", GOOD | {"prompt": [257]}),
]
_IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
BAD_CHATS = [
    (400, 'messages[0].role: "king" is not supported; give', SAID | {"messages": [{"role": "king", "content": "a"}]}),
    (400, "messages[0].role: missing; give", SAID | {"messages": [{"content": "a"}]}),
    (400, 'messages[0].content[0].type: "image_url" is', SAID | {"messages": [{"role": "user", "content": [_IMAGE]}]}),
    (400, "tools[0].function: missing; give", SAID | {"tools": [{"type": "function"}]}),
    (400, "messages[0].colour: 5 is not", SAID | {"messages": [{"role": "user", "content": "a", "colour": 5}]}),
    *[
        (400, name, SAID | {name: value})
        for name, values in {
            "messages": [[], "hello", [{"role": "user"}], [{"role": "king", "content": "a"}], [{"content": "a"}], [5]],
            "tools": [[{"type": "function"}]],
            "tool_choice": ["maybe", "required", {"type": "function", "function": {"name": "look"}}],
            "logprobs": [2],
            "top_logprobs": [21, 3],
            "max_tokens": [0],
            "prompt": ["1234"],
        }.items()
        for value in values
    ],
]


def test_what_is_malformed_is_refused_with_the_name_of_the_field(server):
    worker, port, _ = server
    assert len(BAD) + len(BAD_CHATS) > 50
    for path, cases in (("/v1/completions", BAD), ("/v1/chat/completions", BAD_CHATS)):
        for status, part, body in cases:
            found, _, text = call(port, path, body)
            error = json.loads(text)["error"]
            assert found == status and part in f"{error['message']} {error['param']}", (body, found, text)
            assert "\n" not in error["message"]
            assert not re.search("Input should|Extra inputs|Field required|Value error", error["message"]), error
    for method, path, status, said in (
        ("GET", "/v1/completions", 405, "GET '/v1/completions': use POST"),
        ("POST", "/health", 405, "use GET or HEAD"),
        ("POST", "/v1/responses", 404, "not a route of this server; use /v1/chat/completions, /v1/completions"),
    ):
        found, _, text = call(port, path, b"{}" if method == "POST" else None, method=method)
        assert found == status and said in json.loads(text)["error"]["message"], text
    assert call(port, "/v1/completions", GOOD)[0] == 200
    assert worker.loop.engine.idle


def test_a_slash_at_the_end_of_a_route_changes_nothing(server):
    """A redirection would lead to http, also behind a TLS proxy, and to whatever Host a request named."""
    _, port, _ = server
    assert call(port, "/v1/completions/", GOOD)[0] == call(port, "/v1/models/parrot/", method="GET")[0] == 200
    assert json.loads(call(port, "/v1/models/", method="GET")[2])["object"] == "list"
    assert call(port, "/v1/completions/", GOOD, {"Host": "elsewhere.example"})[0] == 403
    assert call(port, "/v1/completions//", GOOD)[0] == 404


def test_chat_without_a_template_is_refused():
    with serving() as (_, port, _):
        status, _, text = call(port, "/v1/chat/completions", SAID)
        assert status == 400 and "has none; use completions" in text


def test_keys_bodies_and_the_number_of_requests_have_limits(caplog):
    with serving(most=2, keys=("first", "second"), body_bytes=2000) as (worker, port, model):
        key = {"Authorization": "Bearer second", "X-Request-Id": "mine-1"}
        for wrong in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic second"}):
            for path, body in (("/v1/completions", GOOD), ("/v1/models", None)):
                assert call(port, path, body, wrong)[0] == 401
        assert client(port, "first").models.list().data[0].id == "parrot"
        assert client(port, "first").models.retrieve("parrot").id == "parrot"
        status, headers, _ = call(port, "/v1/completions", GOOD, key)
        assert status == 200 and headers["X-Request-Id"] == "mine-1"
        long = GOOD | {"prompt": "x" * 3000}
        assert call(port, "/v1/completions", long, key)[0] == 413
        chunked = {**key, "Transfer-Encoding": "chunked"}
        assert call(port, "/v1/completions", b"bb8\r\n" + b"x" * 3000 + b"\r\n0\r\n\r\n", chunked)[0] == 413
        model.pause = 0.02
        slow = client(port, "first").completions.create(model="parrot", prompt="1234", max_tokens=200, n=2, stream=True)
        next(slow)
        status, headers, text = call(port, "/v1/completions", GOOD, key)
        assert status == 429 and headers["Retry-After"] == "1" and "2 of at most 2" in text
        slow.close()
        wait_until(lambda: call(port, "/v1/completions", GOOD, key)[0] == 200)
        assert worker.loop.engine.idle


def test_a_logit_that_is_no_number_ends_one_request(server):
    worker, port, _ = server
    status, _, text = call(port, "/v1/completions", GOOD | {"prompt": "!234", "max_tokens": 9})
    assert status == 500 and "the model computed a logit that is NaN" in text
    status, _, text = call(port, "/v1/completions", GOOD | {"prompt": "!234", "max_tokens": 9, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200 and "NaN" in events[-1]["error"]["message"] and len(events) == 4
    assert call(port, "/v1/completions", GOOD)[0] == 200 and worker.loop.engine.idle
    assert 'vllm:request_success_total{finished_reason="error",model_name="parrot"} 2.0' in call(port, "/metrics")[2]


def test_no_parameter_of_one_request_ends_the_server(server):
    worker, port, _ = server
    odds = [{"temperature": 1e-310}, {"temperature": 1e-320, "top_k": 2}, {"top_k": 10**30}, {"top_p": 1e-320}]
    for odd in [*odds, {"top_k": -1}]:
        status, _, text = call(port, "/v1/completions", GOOD | odd)
        assert status == 200 and json.loads(text)["choices"][0]["text"] == "Gr", (odd, text)
    assert worker.loop.engine.idle


def test_while_a_rank_is_silent_nothing_is_taken():
    with serving() as (worker, port, _):
        worker.silent = lambda: [1, 3]
        status, _, text = call(port, "/ready")
        assert status == 503 and json.loads(text)["status"] == "ranks 1, 3 silent"
        status, headers, text = call(port, "/v1/completions", GOOD)
        assert status == 503 and headers["Retry-After"] == "5" and "ranks 1, 3 silent" in text
        worker.silent = tuple
        assert call(port, "/ready")[0] == 200 and call(port, "/v1/completions", GOOD)[0] == 200


def test_when_a_rank_fails_whole_texts_and_streams_get_an_error():
    worker = Worker(RankLoop(Engine(PlainSession(None, 100, 257), ByteTokenizer(256))), 8, Metrics("parrot"))
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    app = Service(worker, Settings("parrot"), readers_of(ByteTokenizer, Limits("parrot", 100, 1 << 20))).app()
    with serve_in_thread(app, listener, PATIENCE), ThreadPoolExecutor(2) as clients:
        whole, stream = (clients.submit(call, port, "/v1/completions", GOOD | {"stream": s}) for s in (False, True))
        wait_until(lambda: len(worker._deliver) == 2)  # as when a pass waits for a rank that does not come
        worker.fail()
        assert call(port, "/ready")[0] == 503 and call(port, "/v1/completions", GOOD)[0] == 503
        status, _, text = whole.result()
        assert status == 503 and "a rank of the server failed" in json.loads(text)["error"]["message"]
        status, _, text = stream.result()
        last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        assert status == 200 and "a rank of the server failed" in last["error"]["message"]


def test_a_server_without_a_request_yet_tells_its_free_cache():
    worker = Worker(RankLoop(Engine(PlainSession(None, 100, 257), ByteTokenizer(256))), 8, Metrics("parrot"))
    assert "cache_tokens_free 100.0" in str(worker.metrics.text())


def test_an_error_of_a_pass_is_told_to_all_clients():
    worker = Worker(RankLoop(Engine(PlainSession(None, 100, 257), ByteTokenizer(256))), 8, Metrics("parrot"))
    outputs = []
    requests = [Request(name, [1, 2], SamplingParams(num_tokens_to_generate=5)) for name in "ab"]
    worker.submit(requests, outputs.append)
    with pytest.raises(TypeError, match="not callable"):
        worker.run(lambda: False, 0)
    assert [(output.request, output.finish) for output in outputs] == [("a", "cancelled"), ("b", "cancelled")]


def test_who_leaves_costs_nothing_more():
    with serving() as (worker, port, model):
        model.pause = 0.01
        stream = client(port).completions.create(model="parrot", prompt="1234", max_tokens=500, stream=True)
        next(stream)
        stream.close()
        wait_until(lambda: worker.loop.engine.idle)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", json.dumps(GOOD | {"max_tokens": 500}), JSON)
        wait_until(lambda: worker.loop.engine.running)
        connection.close()
        wait_until(lambda: worker.loop.engine.idle)
        text = call(port, "/metrics")[2]
        assert 'request_success_total{finished_reason="abort",model_name="parrot"} 2.0' in text
        assert 'vllm:num_requests_running{model_name="parrot"} 0.0' in text


def test_prefixes_are_shared_within_one_key_alone():
    with serving(keys=("a", "b")) as (_, port, _):
        prompt = "x" * 40
        ask = {key: client(port, key).completions.create for key in "ab"}
        cached = [
            ask[key](model="parrot", prompt=prompt, max_tokens=3).usage.prompt_tokens_details.cached_tokens
            for key in "aba"
        ]
        assert cached == [0, 0, 39]
        two = ask["b"](model="parrot", prompt=[prompt, "y" * 40], n=2, max_tokens=3).usage
        assert (two.prompt_tokens, two.prompt_tokens_details.cached_tokens) == (80, 39)  # each text had them
        metrics = call(port, "/metrics")[2]
        for name, value in {
            "prompt_tokens_cached_total": 4 * 39,  # also of the second text of a new prompt
            "prompt_tokens_total": 280,
            "generation_tokens_total": 21,
            "time_to_first_token_seconds_count": 7,
            "inter_token_latency_seconds_count": 14,
            "e2e_request_latency_seconds_count": 7,
        }.items():
            assert f'vllm:{name}{{model_name="parrot"}} {value}.0' in metrics


def test_a_stop_finishes_what_has_begun_and_logs_have_no_texts(caplog):
    caplog.set_level(logging.INFO)
    answers: list[str] = []
    with serving() as (worker, port, model):
        logging.getLogger("megatron.context_parallel.serving").propagate = True
        model.pause = 0.01
        create = client(port).completions.create
        asking = threading.Thread(
            target=lambda: answers.append(create(model="parrot", prompt="1234", max_tokens=40).choices[0].text)
        )
        asking.start()
        wait_until(lambda: worker.loop.engine.running)
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "X-Request-Id": "mine"}
        assert call(port, "/ready", None, trace)[0] == 200
        worker.draining = True
        assert call(port, "/ready")[0] == 503 and call(port, "/health")[0] == 200
        assert call(port, "/v1/completions", GOOD)[0] == 503
        asking.join(20)
    assert answers == [(TEXT * 3)[: len(answers[0])]] and len(answers[0].encode()) in range(38, 41)
    lines = [json.loads(r.message) for r in caplog.records if r.name.endswith("serving.app")]
    ready = next(line for line in lines if line["request"] == "mine")
    assert (ready["trace_id"], ready["parent_id"]) == ("a" * 32, "b" * 16)
    done = next(line for line in lines if line["path"] == "/v1/completions" and line["status"] == 200)
    assert (done["prompt_tokens"], done["completion_tokens"], done["complete"]) == (4, 40, True)
    assert "1234" not in json.dumps([{**line, "id": "", "request": ""} for line in lines]) and "Gr" not in caplog.text


def test_boards_and_alerts_use_metrics_that_exist():
    exported = Metrics("parrot").text().decode()
    names = {line.split()[2] for line in exported.splitlines() if line.startswith("# TYPE")}
    for file, parse in (("grafana.json", json.loads), ("alerts.yml", yaml.safe_load)):
        text = (BOARDS / file).read_text()
        used = {*re.findall(r"\b(?:vllm:\w+|(?:requests|passes|cache|handoffs)_\w+)", text)}
        assert (
            parse(text)
            and len(used) > 4
            and all(any(re.fullmatch(f"{name}(_bucket)?", one) for name in names) for one in used)
        )


PREFILL = {  # what vLLM's example proxy sends
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def test_prefill_for_a_decoder():
    """The answer to a proxy has a ticket and no text; the sequence stays until its release."""
    tickets = Tickets({"dtype": "float32"}, (Place("node1", 7, 0, 0, 4),))
    with serving(Chatty, handed=Calls(), tickets=tickets) as (worker, port, _):
        engine = worker.loop.engine
        ask = {"model": "parrot", "prompt": [1, 2, 3], "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
        status, _, body = call(port, "/v1/completions", ask)
        answer = json.loads(body)
        assert status == 200 and answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 0
        ticket = Ticket.of(answer["kv_transfer_params"])
        assert ticket and ticket.tokens == 3 and ticket.tokens_digest == digest_of_tokens([1, 2, 3])
        assert ticket.places == tickets.places and ticket.model == tickets.model and len(ticket.id) == 32
        wait_until(lambda: [*engine.pinned] == [ticket.id] and engine.idle)
        wait_until(lambda: "handoffs_pinned 1.0" in call(port, "/metrics")[2])
        worker.release(ticket.id)
        wait_until(lambda: "handoffs_pinned 0.0" in call(port, "/metrics")[2])
        assert 'passes_total{variant=""} 1.0' in call(port, "/metrics")[2]  # a release is none
        chat = {"model": "parrot", "messages": SAID["messages"], "kv_transfer_params": PREFILL, "max_tokens": 1}
        other = Ticket.of(json.loads(call(port, "/v1/chat/completions", chat)[2])["kv_transfer_params"])
        assert other and other.id != ticket.id
        worker.release(other.id)
        for wrong in (
            {"stream": True},
            {"n": 2},
            {"prompt": [[1], [2]]},
            {"kv_transfer_params": {}},
            {"kv_transfer_params": {"do_remote_decode": False}},
            {"kv_transfer_params": PREFILL | {"do_remote_prefill": True}},
            {"kv_transfer_params": PREFILL | {"remote_host": "evil"}},
            {"kv_transfer_params": PREFILL | {"colour": "red"}},
        ):
            status, _, body = call(port, "/v1/completions", ask | wrong)
            assert status == 400 and "kv_transfer_params" in json.loads(body)["error"]["param"], (wrong, body)
        assert "kv_transfer_params" not in call(port, "/v1/completions", GOOD)[2]


def test_a_server_without_handoffs_refuses_them(server):
    status, _, body = call(server[1], "/v1/completions", GOOD | {"kv_transfer_params": PREFILL})
    assert status == 400 and "start it with --handoff-host" in body
    assert call(server[1], "/v1/completions", GOOD | {"kv_transfer_params": None})[0] == 200


def test_the_page_has_the_fields_of_the_code():
    assert make_fields_table.main(["--check"]) == 0
