"""The server with OpenAI's own client: texts, streams, keys, limits, and clients that disconnect."""

import http.client
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel.inference.engine import Engine, Request
from megatron.context_parallel.inference.rank_loop import RankLoop
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.integration.vllm.wire import Place, Ticket, digest_of_tokens
from megatron.context_parallel.serving.app import Service, Settings
from megatron.context_parallel.serving.handoff import Tickets
from megatron.context_parallel.serving.listen import bind, serve_in_thread
from megatron.context_parallel.serving.metrics import Metrics
from megatron.context_parallel.serving.protocol import Limits
from megatron.context_parallel.serving.worker import Worker
from tests.support.chatty import Chatty
from tests.support.handoff_case import Calls
from tests.support.plain_session import PlainSession
from tests.support.server_case import GOOD, JSON, PATIENCE, SAID, TEXT, call, readers_of, serving, wait_until


def client(port: int, key: str = "none") -> openai.OpenAI:
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
    assert told.tokens[0] == "G" and told.text_offset[:2] == [0, 1]
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
    assert bytes(whole.choices[0].logprobs.content[0].bytes) == b"G"


BAD = [
    (400, "Invalid JSON", b""),
    (400, "Invalid JSON", b"{"),
    (400, "Invalid JSON", b"\xff\xfe"),
    (400, "", b"[]"),
    (400, "", b"null"),
    (400, "prompt", {"model": "parrot"}),
    (400, "model", {"prompt": "1234"}),
    (404, "'other'", GOOD | {"model": "other"}),
    *[
        (400, name, GOOD | {name: value})
        for name, values in {
            "model": [1, None],
            "prompt": [None, 5, [], [[]], [1, "a"], {"a": 1}, [-1], "", [[1], []]],
            "max_tokens": [0, -1, 1.5, "8", True],
            "temperature": [-0.1, "warm", [1]],
            "top_p": [0, 1.1, "all"],
            "top_k": [-1, 0.5],
            "n": [0, 129, "two"],
            "stop": ["", [""], ["a"] * 17, 5, [None]],
            "seed": [1.5, "x", 2**70],
            "stream": ["yes", 1],
            "stream_options": [[], {"include_usage": 1}, {"else": True}],
            "logprobs": [-1, 21, True],
            "echo": [True],
            "best_of": [2],
            "suffix": ["end"],
            "presence_penalty": [0.5],
            "frequency_penalty": [-1],
            "logit_bias": [{"5": 1}],
            "colour": ["red"],
        }.items()
        for value in values
    ],
    (400, "9 texts at once; request at most 8", GOOD | {"n": 9}),
    (400, "give a prompt below 1000", GOOD | {"prompt": "x" * 1000}),
    (400, "give at most 996 new tokens", GOOD | {"max_tokens": 997}),
    (400, "token 257", GOOD | {"prompt": [257]}),
]
BAD_CHATS = [
    (400, name, SAID | {name: value})
    for name, values in {
        "messages": [[], "hello", [{"role": "user"}], [{"role": "king", "content": "a"}], [{"content": "a"}], [5]],
        "tools": [[{"type": "function"}]],
        "response_format": [{"type": "json_object"}],
        "logprobs": [2],
        "top_logprobs": [21],
        "prompt": ["1234"],
    }.items()
    for value in values
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
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/v2/models", 404)):
        found, _, text = call(port, path, b"{}" if method == "POST" else None, method=method)
        assert found == status and json.loads(text)["error"]["message"]
    assert call(port, "/v1/completions", GOOD)[0] == 200
    assert worker.loop.engine.idle


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
    assert 'requests_total{finish="error"} 2.0' in call(port, "/metrics")[2]


def test_no_parameter_of_one_request_ends_the_server(server):
    worker, port, _ = server
    for odd in ({"temperature": 1e-310}, {"temperature": 1e-320, "top_k": 2}, {"top_k": 10**30}, {"top_p": 1e-320}):
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
    worker = Worker(RankLoop(Engine(PlainSession(None, 100, 257), ByteTokenizer(256))), 8, Metrics())
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


def test_an_error_of_a_pass_is_told_to_all_clients():
    worker = Worker(RankLoop(Engine(PlainSession(None, 100, 257), ByteTokenizer(256))), 8, Metrics())
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
        assert 'requests_total{finish="cancelled"} 2.0' in text and "requests_running 0.0" in text


def test_prefixes_are_shared_within_one_key_alone():
    with serving(keys=("a", "b")) as (_, port, _):
        prompt = "x" * 40
        ask = {key: client(port, key).completions.create for key in "ab"}
        cached = [
            ask[key](model="parrot", prompt=prompt, max_tokens=2).usage.prompt_tokens_details.cached_tokens
            for key in "aba"
        ]
        assert cached == [0, 0, 39]
        metrics = call(port, "/metrics")[2]
        assert "prompt_tokens_cached_total 39.0" in metrics and "prompt_tokens_total 120.0" in metrics
        assert "ttft_seconds_count 3.0" in metrics and "ttit_seconds_count 3.0" in metrics


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
        assert call(port, "/ready")[0] == 200
        worker.draining = True
        assert call(port, "/ready")[0] == 503 and call(port, "/health")[0] == 200
        assert call(port, "/v1/completions", GOOD)[0] == 503
        asking.join(20)
    assert answers == [(TEXT * 3)[: len(answers[0])]] and len(answers[0].encode()) in range(38, 41)
    lines = [json.loads(r.message) for r in caplog.records if r.name.endswith("serving.app")]
    done = next(line for line in lines if line["path"] == "/v1/completions" and line["status"] == 200)
    assert (done["prompt_tokens"], done["completion_tokens"], done["complete"]) == (4, 40, True)
    assert "1234" not in json.dumps([{**line, "id": "", "request": ""} for line in lines]) and "Gr" not in caplog.text


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
        assert "handoffs_pinned 1.0" in call(port, "/metrics")[2]
        worker.release(ticket.id)
        wait_until(lambda: not engine.pinned)
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
