"""The server under load: 200 clients, of whom one in a hundred is hostile, and 1,000 connections.

What a client gets, whole or as a stream, is what it gets alone.

python -m tests.campaigns.server [--tiny-temperatures]
"""

import http.client
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import torch
from torch import Tensor

from megatron.context_parallel.serving.connections import Patience
from tests.support.chatty import Chatty
from tests.support.server_case import GOOD, JSON, SAID, call, serving, wait_until

CLIENTS, REQUESTS = 200, 100
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
FIELDS = {  # that good clients may send
    "temperature": (0, 0.5, 2),
    "top_p": (0.3, 0.9),
    "top_k": (1, 3, 40),
    "min_p": (0.1,),
    "n": (2,),
    "stop": ("a", ["ab", "é"]),
    "min_tokens": (1,),
    "ignore_eos": (True,),
    "return_token_ids": (True,),
    "presence_penalty": (-1, 1),
    "frequency_penalty": (-1, 1),
    "repetition_penalty": (0.5, 1.5),
    "logit_bias": ({"97": 5, "256": -100}, {"256": 3}),
}
PATIENCE = Patience(connections=400, idle_seconds=5, client_seconds=5)


class Babble:
    """A model of bytes, for which the last two of them matter."""

    def __init__(self) -> None:
        self.table = 2 * torch.randn(257, 257, generator=torch.Generator().manual_seed(3))

    def __call__(self, tokens: Tensor, positions: Tensor, mask: None, runtime_gather_output: bool) -> Tensor:
        return (self.table[tokens[0]] + self.table[tokens[0].roll(1)].flip(-1)).unsqueeze(0)


def good(number: int) -> tuple[str, dict]:
    """The path and the request of a good client; its texts depend only on the number."""
    draw = random.Random(number)
    said = f"{number} " * draw.randint(1, 30)
    body = {"model": "parrot", "max_tokens": draw.randint(1, 40), "seed": number}
    body |= {name: draw.choice(values) for name, values in FIELDS.items() if draw.random() < 0.2}
    if draw.random() < 0.3:
        body |= {"messages": [{"role": "user", "content": said}], "logprobs": True, "top_logprobs": draw.choice((0, 2))}
        return "/v1/chat/completions", body
    body["prompt"] = draw.choice((said, [said, "1234"], [*said.encode()]))
    return "/v1/completions", body | draw.choice(({}, {"echo": True}, {"echo": True, "logprobs": 2}, {"logprobs": 0}))


def answer(port: int, number: int, turn: int = 0) -> list[dict]:
    """What one good client gets for its request, every other time as a stream: its texts with all that is said of them.

    It retries while the server is full.
    """
    path, body = good(number)
    streamed = bool((number + turn) % 2)
    while True:
        status, _, text = call(port, path, body | {"stream": streamed}, wait=900)
        if status not in (429, 503):
            break
        time.sleep(0.5)
    assert status == 200, text
    if not streamed:
        return [_choice(one) for one in json.loads(text)["choices"]]
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    found: dict[int, dict] = {}
    for part in [_choice(one) for event in events for one in event["choices"]]:
        known = found.setdefault(part["index"], part)
        if known is not part:
            found[part["index"]] = _joined(known, part)
    return [found[index] for index in sorted(found)]


def _choice(given: dict) -> dict:
    """A choice, or a part of one, with its text in one place."""
    said = given.get("message") or given.get("delta") or {"content": given.get("text")}
    return {
        "index": given["index"],
        "text": said.get("content") or "",
        "logprobs": given["logprobs"] or {},
        "finish": given["finish_reason"],
        "ids": given.get("token_ids") or [],
    }


def _joined(first: dict, then: dict) -> dict:
    """Two parts of a choice, one after the other."""
    assert first["finish"] is None, f"{then} comes behind the end"
    logprobs = {name: first["logprobs"].get(name, []) + more for name, more in then["logprobs"].items()}
    return {
        "index": first["index"],
        "text": first["text"] + then["text"],
        "logprobs": first["logprobs"] | logprobs,
        "finish": then["finish"],
        "ids": first["ids"] + then["ids"],
    }


# -- hostile clients --------------------------------------------------------------------------------


def completion(port: int, body: object, headers: dict | None = None) -> str:
    return str(call(port, "/v1/completions", body, headers, wait=900)[0])


def prompt_of(inside: bytes) -> bytes:
    return b'{"model": "parrot", "prompt": ' + inside + b"}"


def say(port: int, content: str) -> str:
    said = SAID | {"messages": [{"role": "user", "content": content}]}
    return str(call(port, "/v1/chat/completions", said, wait=900)[0])


def hold(port: int, *parts: bytes, small: bool = False, half: bool = False) -> str:
    """Send parts a quarter of a second apart, read nothing, and wait until the server closes the connection."""
    with socket.socket() as client:
        if small:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect(("127.0.0.1", port))
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(0.25)
            if half:
                client.shutdown(socket.SHUT_WR)
            if small:
                time.sleep(3 * PATIENCE.client_seconds)
            while client.recv(1 << 16):
                pass
        except (ConnectionError, BrokenPipeError):
            return "cut"
        return "ended"


def request(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data


def leaves(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(GOOD | {"stream": True, "max_tokens": 500}), JSON)
    status = connection.getresponse().status
    connection.close()
    return f"{status}"


HOSTILE: dict[str, Callable[[int], str]] = {
    "2 MB of strings": lambda port: completion(port, prompt_of(b"[" + b'"",' * 700_000 + b'""]')),
    "16 MB of numbers": lambda port: completion(port, prompt_of(b"[" + b"0," * 8_000_000 + b"0]")),
    "600,000 lists": lambda port: completion(port, prompt_of(b"[" + b"[]," * 600_000 + b"[]]")),
    "a long text": lambda port: completion(port, prompt_of(b'"' + b"x" * 15_000_000 + b'"')),
    "too long a body": lambda port: completion(port, b" " * 17_000_000),
    "deep lists": lambda port: completion(port, prompt_of(b"[" * 1_000_000)),
    "deep objects": lambda port: completion(port, b'{"a":' * 1_000_000),
    "30,000 fields": lambda port: completion(port, json.dumps(GOOD | {f"{i}": 0 for i in range(30_000)}).encode()),
    "a long number": lambda port: completion(port, prompt_of(b"9" * 1_000_000)),
    "bad UTF-8": lambda port: completion(port, prompt_of(b'"' + b"\xff" * 100_000 + b'"')),
    "half a surrogate": lambda port: completion(port, prompt_of(b'"\\ud800"')),
    "another type": lambda port: completion(port, GOOD, {"Content-Type": "text/plain"}),
    "another host": lambda port: completion(port, GOOD, {"Host": "evil.example.org"}),
    "forever": lambda port: say(port, "forever"),
    "memory": lambda port: say(port, "memory"),
    "abort": lambda port: say(port, "abort"),
    "panic": lambda port: say(port, "panic"),
    "long log-probabilities": lambda port: completion(port, GOOD | {"logprobs": 20, "max_tokens": 900, "n": 20}),
    "slow head": lambda port: hold(port, *(HEAD[i : i + 1] for i in range(len(HEAD)))),
    "slow body": lambda port: hold(port, HEAD + b"Content-Length: 99\r\n\r\n", *[b" "] * 98),
    "slow chunks": lambda port: hold(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 98),
    "long head": lambda port: hold(port, HEAD + b"X: " + b"x" * 1_000_000),
    "no HTTP": lambda port: hold(port, b"\x16\x03\x01" * 1000),
    "half closed": lambda port: hold(port, request(GOOD | {"max_tokens": 900}), half=True),
    "reads nothing": lambda port: hold(port, request(GOOD | {"max_tokens": 900, "stream": True}), small=True),
    "pipelines": lambda port: hold(port, *[request(GOOD)] * 20),
    "leaves": leaves,
}
TINY_TEMPERATURE = {
    f"temperature {value}": lambda port, value=value: completion(port, GOOD | {"temperature": value})
    for value in (1e-310, 1e-45, 5e-324)
}


def attack(port: int, stop: threading.Event, seen: Counter, kinds: list[str], first: int) -> None:
    """One hostile client: it tries one kind of attack after the other until the good clients are done."""
    at = first
    while not stop.is_set():
        kind = kinds[at % len(kinds)]
        try:
            seen[kind, (HOSTILE | TINY_TEMPERATURE)[kind](port)] += 1
        except (OSError, http.client.HTTPException) as error:  # refused, and the connection cut, while it still sends
            seen[kind, type(error).__name__] += 1
        at += 1


def watch_health(port: int, stop: threading.Event, waits: list[float]) -> None:
    while not stop.wait(0.1):
        started = time.monotonic()
        assert call(port, "/health", wait=900)[0] == 200
        waits.append(time.monotonic() - started)


def beside_hostile_ones(port: int, kinds: list[str]) -> None:
    """Texts beside hostile clients must be those alone."""
    numbers = range(REQUESTS)
    with ThreadPoolExecutor(2) as few:
        alone = list(few.map(lambda number: answer(port, number), numbers))
    stop, seen, waits = threading.Event(), Counter[tuple[str, str]](), list[float]()
    hostile = [threading.Thread(target=attack, args=(port, stop, seen, kinds, i * 11)) for i in range(CLIENTS // 100)]
    watching = threading.Thread(target=watch_health, args=(port, stop, waits))
    for thread in (watching, *hostile):
        thread.start()
    found, rounds = list[list[dict]](), 0
    with ThreadPoolExecutor(CLIENTS - len(hostile)) as clients:
        while {kind for kind, _ in seen} < {*kinds}:
            found = list(clients.map(partial(answer, port), numbers, [rounds + 1] * REQUESTS))
            assert found == alone, [pair for pair in zip(found, alone, strict=True) if pair[0] != pair[1]][:3]
            rounds += 1
    stop.set()
    for thread in (watching, *hostile):
        thread.join()
    for (kind, how), count in sorted(seen.items()):
        print(f"  {kind}: {how} ({count})")
    print(f"{rounds} times {len(found)} texts beside {sum(seen.values())} attacks are those alone")
    print(f"/health: {len(waits)} times, {max(waits):.2f} s at most")


def thousand_connections(port: int) -> None:
    """Some connections get status 503, the others wait. After they have left, the server works as before."""
    clients = []
    for _ in range(1000):
        clients.append(socket.create_connection(("127.0.0.1", port), timeout=20))
    ours = psutil.Process()
    print(f"1,000 connections: {ours.num_fds() - 1000} other files, {call_patiently(port)}")
    for client in clients:
        client.close()
    wait_until(lambda: call_patiently(port) == "200")


def call_patiently(port: int) -> str:
    try:
        return str(call(port, "/health")[0])
    except OSError as error:
        return type(error).__name__


def main() -> None:
    with serving(Chatty, most=100, size=40_000, patience=PATIENCE, send_buffer=4096) as (worker, port, _):
        engine, process = worker.loop.engine, psutil.Process()
        engine.cache.model = Babble()
        tiny = TINY_TEMPERATURE if "--tiny-temperatures" in sys.argv else {}
        beside_hostile_ones(port, [*HOSTILE, *tiny])
        wait_until(lambda: engine.idle and not worker._deliver)
        memory = [process.memory_info().rss // 2**20]
        with ThreadPoolExecutor(CLIENTS) as clients:
            for part in range(5):
                list(clients.map(partial(answer, port), range(part * 200, part * 200 + 200)))
                wait_until(lambda: engine.idle and not worker._deliver)
                memory.append(process.memory_info().rss // 2**20)
        print(f"memory: {memory} MiB")
        assert memory[-1] - memory[1] < 20, "memory grows"
        thousand_connections(port)
        for sequence in [*engine._reusable]:
            engine._evict(sequence)
        assert engine.cache.room() == engine.capacity and not engine._prefixes._holders
        print("the cache is empty, and nothing waits")


if __name__ == "__main__":
    main()
