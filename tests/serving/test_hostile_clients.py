"""The server and hostile clients: what they send, how slowly, how many they are, and under which host names."""

import errno
import http.client
import json
import logging
import os
import resource
import socket
import subprocess
import sys

import psutil
import pytest
from pydantic import ValidationError

from megatron.context_parallel import UsageError
from megatron.context_parallel.commands.run_text_generation_server import read_keys
from megatron.context_parallel.generation.flags import Serve
from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from megatron.context_parallel.serving import connections
from megatron.context_parallel.serving import reader as reader_module
from megatron.context_parallel.serving.connections import Patience
from megatron.context_parallel.serving.hosts import names_of
from megatron.context_parallel.serving.log_lines import LimitedLines
from megatron.context_parallel.serving.protocol import Chat, Completion, Limits, Refused, read
from megatron.context_parallel.serving.requests import requests_of
from tests.support import llama_case
from tests.support.chatty import Chatty
from tests.support.plain_session import PlainSession
from tests.support.server_case import GOOD, JSON, SAID, call, readers_of, serving, wait_until

LIMITS = Limits("parrot", length=1000, body_bytes=1 << 16)
BYTES = ByteTokenizer(256)

# ------------------------------------------------------------------------------------------- what a request may hold


def refusal(body: bytes, kind: type = Completion) -> str:
    with pytest.raises(Refused) as refused:
        read(kind, body, BYTES, LIMITS)
    assert refused.value.status == 400 and "\n" not in str(refused.value) and len(str(refused.value)) < 300
    return str(refused.value)


def prompt_of(inside: bytes) -> bytes:
    return b'{"model": "parrot", "prompt": ' + inside + b"}"


def test_a_body_of_very_many_values_is_refused_before_it_is_parsed():
    # 65,536 bytes may have 2,730 values, so that they take 10 times the memory at most.
    assert "more than 2730 values" in refusal(prompt_of(b"[" + b"0," * 2730 + b"0]"))
    assert "more than 2730 values" in refusal(prompt_of(b"[" + b"[]," * 2730 + b"[]]"))
    assert "more than 32768 strings" in refusal(prompt_of(b"[" + b'"",' * 32769 + b'""]'))
    assert "more than 32768 strings" in refusal(b'{"a":' + b'"\\\\","b":' * 32769 + b"0}")
    assert "recursion" in refusal(prompt_of(b"[" * 5000 + b"]" * 5000))
    assert "prompt of 1001 tokens" in refusal(prompt_of(b"[" + b"0," * 1000 + b"0]"))


def test_commas_and_quotes_inside_a_text_are_no_values():
    text = ',"\\,' * 240 + "\\"
    body, prompts = read(Completion, json.dumps({"model": "parrot", "prompt": text}).encode(), BYTES, LIMITS)
    assert prompts == [list(text.encode())] and body.prompt is None
    many = Limits("parrot", length=8000, body_bytes=1 << 16)
    assert len(read(Completion, prompt_of(b'"' + b"," * 5000 + b'"'), BYTES, many)[1][0]) == 5000


@pytest.mark.parametrize("wrong", [b'""', b"-1", b"[]", b"{}", b"null", b"[-1]"])
def test_a_list_of_wrong_values_is_one_error_of_each_type(wrong):
    with pytest.raises(ValidationError) as error:
        Completion.model_validate_json(prompt_of(b"[" + (wrong + b",") * 200 + wrong + b"]"))
    assert error.value.error_count() <= 4
    with pytest.raises(ValidationError) as error:
        Chat.model_validate_json(b'{"model": "parrot", "messages": [' + (wrong + b",") * 200 + wrong + b"]}")
    assert error.value.error_count() <= 3


def test_long_texts_and_names_are_refused_and_not_repeated():
    assert "prompt of 5000 characters: more than 1000 tokens" in refusal(prompt_of(b'"' + b"x" * 5000 + b'"'))
    said = json.dumps({"model": "parrot", "messages": [{"role": "user", "content": "x" * 600}] * 2})
    assert "prompt of 1200 characters" in refusal(said.encode(), Chat)
    assert "at most 1000 characters" in refusal(json.dumps(GOOD | {"stop": "x" * 1001}).encode())
    error = refusal(json.dumps(GOOD | {"x\n" * 3000: 1}).encode())
    assert error.endswith("unknown field; leave it out")
    for name in ("seed", "best_of", "prompt"):
        body = json.dumps({key: value for key, value in GOOD.items() if key != name})
        assert f"{name}: not supported; give " in refusal(f'{body[:-1]}, "{name}": {"9" * 4000}}}'.encode())


def test_log_probabilities_of_a_request_have_a_limit():
    engine = Engine(PlainSession(None, 1 << 17, 257), BYTES)
    many = read(Completion, json.dumps(GOOD | {"max_tokens": 2500, "n": 20, "logprobs": 20}).encode(), BYTES, LIMITS)
    with pytest.raises(Refused, match=r"logprobs: 21 for each of 50000 tokens; .* at most 1048576 log-prob"):
        requests_of(*many, "name", "", engine, new=10)
    many[0].logprobs = 19
    assert len(requests_of(*many, "name", "", engine, new=10)) == 20


# -------------------------------------------------------------------------------- chat templates and tokenizers


def test_readers_import_nothing_slow():
    names = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "megatron.core", "llguidance"} & {*names}


IMPORTED = "import sys, megatron.context_parallel.serving.reader, tests.support.chatty; print(*sys.modules)"


def test_a_reader_whose_server_has_ended_says_nothing():
    for program in (LEFT_BEFORE_IT_WAS_READY, LEFT_WITH_AN_UNREAD_ANSWER):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


LEFT_BEFORE_IT_WAS_READY = """
from multiprocessing import Pipe
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.serving.reader import _work
ours, theirs = Pipe()
ours.close()
_work(theirs, ByteTokenizer(256), None)
"""

LEFT_WITH_AN_UNREAD_ANSWER = """
import os
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.serving.reader import Reader
assert Reader(ByteTokenizer(256), None)._pipe.poll(60)
os._exit(0)
"""


def say(port: int, content: str) -> tuple[int, str]:
    status, _, text = call(port, "/v1/chat/completions", SAID | {"messages": [{"role": "user", "content": content}]})
    return status, text


def test_what_takes_forever_or_all_memory_ends_one_request(monkeypatch):
    monkeypatch.setattr(reader_module, "_SECONDS", 0.3)
    with serving(Chatty) as (_, port, _):
        for content, why in (
            ("forever", "takes more than 0.3 s to read"),
            ("memory", "takes more than 1024 MiB to read"),
            ("abort", "takes more than 1024 MiB to read"),
            ("panic", "messages: the tokenizer fails (Panic: at the disco)"),
        ):
            status, text = say(port, content)
            assert status == 400 and why in json.loads(text)["error"]["message"]
            assert say(port, "1234")[0] == 200


def test_a_long_request_that_takes_forever_lets_short_ones_pass(monkeypatch):
    monkeypatch.setattr(reader_module, "_SHORT", 200)
    monkeypatch.setattr(reader_module, "_SECONDS", 600)
    with serving(Chatty) as (_, port, _):
        busy = http.client.HTTPConnection("127.0.0.1", port)
        parts = [{"type": "text", "text": "forever"}, *[{"type": "text", "text": ""}] * 9]
        said = SAID | {"messages": [{"role": "user", "content": parts}]}
        busy.request("POST", "/v1/chat/completions", json.dumps(said), JSON)
        long = readers_of(Chatty, Limits("parrot", 1000, 1 << 20))[1]
        wait_until(lambda: long._ready)
        assert say(port, "1234")[0] == 200 and not long._pipe.poll()
        for fork in psutil.Process(long._process.pid).children():
            fork.kill()
        assert busy.getresponse().status == 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages[9].content.x }}",
        "{{ messages + 5 }}",
        "{% if %}",
        "{{ raise_exception('a\nb') }}",
        "{% for a in messages %}{{ a.content.format }}{{ ''.__class__.__mro__ }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ '%d' | format('x') }}",
    ],
)
def test_a_chat_template_that_fails_refuses_in_one_line(tmp_path, template):
    llama_case.save_tokenizer(tmp_path, chat=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = HuggingFaceTokenizer(str(tmp_path), special=True)
    with pytest.raises(UsageError, match="messages: the chat template rejects them") as error:
        tokenizer.chat([{"role": "user", "content": "1234"}])
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[" * 200_000, "[]", "null", '{"model": 5}', '{"eos_token_id": 1'])
def test_a_file_of_a_tokenizer_that_is_no_such_file(tmp_path, name, content):
    llama_case.save_tokenizer(tmp_path, chat=False)
    (tmp_path / name).write_text(content)
    if name == "tokenizer.json":
        with pytest.raises(UsageError, match="its tokenizer cannot be read") as error:
            HuggingFaceTokenizer(str(tmp_path), special=True)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
    else:
        assert HuggingFaceTokenizer(str(tmp_path), special=True).ends == {2}


# ----------------------------------------------------------------------------------- slow clients, and very many


def dial(port: int, first: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=120)
    client.sendall(first)
    return client


def ended(client: socket.socket) -> bool:
    """Wait until the server has ended a connection."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_who_does_not_send_a_whole_request_is_cut():
    with serving(patience=Patience(client_seconds=0.3, idle_seconds=60)) as (_, port, _):
        half = HEAD + b"Content-Length: 50\r\n\r\n{"
        chunk = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"
        refused = HEAD + b"Content-Length: 20000000\r\n\r\n"  # at once, but its body is still due
        clients = [dial(port, start) for start in (b"", b"POST", HEAD, half, chunk, refused, GET + half)]
        for client in clients:
            assert ended(client)
        again = dial(port, GET)
        assert again.recv(1 << 16).startswith(b"HTTP/1.1 200")
        again.sendall(b"GE")
        assert ended(again)


def test_an_idle_connection_ends():
    with serving(patience=Patience(client_seconds=60, idle_seconds=1)) as (_, port, _):
        client = dial(port, GET)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200") and ended(client)


def test_who_does_not_read_its_stream_is_cut():
    with serving(patience=Patience(client_seconds=0.3), send_buffer=4096) as (worker, port, model):
        model.pause = 0.002
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        body = json.dumps(GOOD | {"max_tokens": 900, "stream": True}).encode()
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: worker.loop.engine.running)
        wait_until(lambda: worker.loop.engine.idle)
        assert 'request_success_total{finished_reason="abort",model_name="parrot"} 1.0' in call(port, "/metrics")[2]
        client.close()


def test_too_many_connections_are_told_so_and_far_too_many_wait(monkeypatch):
    monkeypatch.setattr(connections, "_SPARE", 1)
    with serving(patience=Patience(connections=2, client_seconds=60)) as (_, port, _):

        def accepted() -> int:
            sockets = psutil.Process().net_connections("tcp")
            return sum(socket.laddr.port == port and socket.status == psutil.CONN_ESTABLISHED for socket in sockets)

        clients = [dial(port) for _ in range(8)]
        wait_until(lambda: accepted() == 3)
        first = http.client.HTTPConnection("127.0.0.1", port)
        first.sock = clients[0]

        def status() -> int:
            first.request("GET", "/health")
            answer = first.getresponse()
            answer.read()
            return answer.status

        wait_until(lambda: status() == 503)  # the last one accepted may not count at once
        for client in clients[1:7]:
            client.close()
        clients[7].sendall(GET)
        assert clients[7].recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_server_without_files_for_connections_pauses_and_goes_on(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as (_, port, _):
        logging.getLogger("megatron.context_parallel.serving").propagate = True
        clients, held = [socket.socket() for _ in range(3)], []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    held.append(os.dup(0))
            for client in clients:
                client.connect(("127.0.0.1", port))
            wait_until(lambda: "a connection was not accepted: [Errno 24]" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in held:
                os.close(file)
        assert call(port, "/health")[0] == 200 and len(caplog.records) < 100
        for client in clients:
            client.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_thread_cannot_start_is_not_left_running(monkeypatch):
    def no_files(server, sockets=None):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connections.Server, "startup", no_files)
    with pytest.raises(RuntimeError, match="ended at its start"), serving():
        pass


def test_connections_for_which_there_are_no_files_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 40)  # open files; other tests leave some
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: raised.append(limits))
    with pytest.raises(
        UsageError, match=r"--limit-concurrency 1000: needs .* ulimit -Hn is 1024; give [678][0-9][0-9]"
    ):
        Patience(connections=1000).check_files()
    assert not raised
    Patience(connections=300).check_files()
    assert 300 < raised[0][0] < 1024 and raised[0][1] == 1024


def test_log_lines_have_a_limit(capsys):
    now = 5.0
    handler = LimitedLines(most=100, clock=lambda: now)
    for _ in range(50):
        handler.handle(logging.makeLogRecord({"msg": "x" * 30}))
    now = 6.1
    handler.handle(logging.makeLogRecord({"msg": "the last"}))
    assert capsys.readouterr().err.splitlines() == ["x" * 30] * 3 + ['{"lines_left_out": 47}', "the last"]


# ------------------------------------------------------------------------------------------- pages, names and keys


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:5000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:1", 200),
        ("10.1.2.3", 200),
        ("[::1]:5000", 200),
        ("llm.example.org:443", 200),
        ("", 200),
        ("evil.example.org", 403),
        ("localhost.evil.org", 403),
        ("127.0.0.1.evil.org", 403),
        ("[::1", 200),
        ("[evil.org]", 403),
        ("a b", 403),
    ],
)
def test_names_of_the_server(named, host, status):
    for path, body in (("/v1/models", None), ("/health", None), ("/v1/completions", GOOD)):
        found, _, text = call(named, path, body, {"Host": host})
        assert found == status, text
        assert status == 200 or "--allowed-hosts" in json.loads(text)["error"]["message"]


@pytest.fixture(scope="module")
def named():
    with serving(hosts=names_of("127.0.0.1", ["LLM.example.org"])) as (_, port, _):
        yield port


def test_the_machine_has_a_name_and_any_can_be_allowed(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "Node7")
    assert {"localhost", "node7", socket.gethostname().lower()} < names_of("0.0.0.0", [])
    with serving(hosts=names_of("0.0.0.0", ["*"])) as (_, port, _):
        assert call(port, "/health", None, {"Host": "evil.example.org"})[0] == 200


def test_bodies_are_json_and_say_so(named):
    for kind, status in (
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain; application/json", 415),
        ("", 415),
    ):
        found, _, text = call(named, "/v1/completions", GOOD, {"Content-Type": kind})
        assert found == status and (status == 200 or "send the body as application/json" in text)


@pytest.mark.parametrize("given", ["", ",", " , ", "\n"])
def test_keys_that_are_none_do_not_open_the_server(monkeypatch, given):
    monkeypatch.setenv("API_KEYS", given)
    with pytest.raises(UsageError, match="API_KEYS: contains no key; write keys separated by commas"):
        read_keys(Serve(load="x"))
    with pytest.raises(UsageError, match="--api-key-file '': cannot be read"):
        read_keys(Serve(load="x", api_key_file=""))
    monkeypatch.delenv("API_KEYS")
    assert read_keys(Serve(load="x")) == ()


def test_bodies_of_all_clients_together_have_a_limit():
    with serving(body_bytes=100) as (_, port, _):
        part = HEAD + b"Content-Length: 100\r\n\r\n" + b" " * 99
        waiting = [dial(port, part) for _ in range(16)]
        wait_until(lambda: call(port, "/v1/completions", GOOD)[0] == 503)
        for client in waiting:
            client.close()
        wait_until(lambda: call(port, "/v1/completions", GOOD)[0] == 200)
