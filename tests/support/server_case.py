"""A server in this process, and requests to it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.rank_loop import RankLoop
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.serving.app import Service, Settings
from megatron.context_parallel.serving.connections import Patience
from megatron.context_parallel.serving.listen import bind, serve_in_thread
from megatron.context_parallel.serving.metrics import Metrics
from megatron.context_parallel.serving.protocol import Limits
from megatron.context_parallel.serving.reader import Reader
from megatron.context_parallel.serving.worker import Worker
from tests.support.plain_session import PlainSession

TEXT = "Größe: 12 €. "

PATIENCE = Patience(connections=512, idle_seconds=5, client_seconds=20)


class Parrot:
    """A model that says `TEXT` after a prompt of 4 bytes: the next byte follows from the number of tokens."""

    pause = 0.0

    def __call__(self, tokens, positions, mask, runtime_gather_output):
        time.sleep(self.pause)
        said = TEXT.encode()
        if tokens[0, 0] == ord("!") and tokens.shape[1] > 6:
            return torch.full((1, 1, 257), float("nan"))
        return torch.nn.functional.one_hot(torch.tensor([[said[(tokens.shape[1] - 4) % len(said)]]]), 257) * 50.0


@cache
def readers_of(kind: type[ByteTokenizer], limits: Limits) -> tuple[Reader, Reader]:
    """The same readers for all servers, because processes take long to start; they end with this one."""
    tokenizer = kind(256)
    return Reader(tokenizer, limits), Reader(tokenizer, limits)


@contextmanager
def serving(
    tokenizer=ByteTokenizer,
    most: int = 8,
    size: int = 1000,
    patience: Patience = PATIENCE,
    send_buffer: int = 0,
    handed=None,
    tickets=None,
    **settings,
) -> Iterator[tuple[Worker, int, Parrot]]:
    """A server and its worker in threads of this process, its port, and the model."""
    model, asked = Parrot(), Settings("parrot", **settings)
    engine = Engine(PlainSession(model, size, 257), tokenizer(256), handed=handed)
    worker, stop = Worker(RankLoop(engine), most, Metrics("parrot")), threading.Event()
    working = threading.Thread(target=worker.run, args=(stop.is_set, 5.0))
    listener = bind("127.0.0.1", 0)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    readers = readers_of(tokenizer, Limits("parrot", size, 1 << 20))
    with serve_in_thread(Service(worker, asked, readers, tickets).app(), listener, patience):
        working.start()
        try:
            yield worker, listener.getsockname()[1], model
        finally:
            stop.set()
            working.join(10)
    assert not working.is_alive() and engine.idle and not (worker._deliver or engine.pinned)


JSON = {"Content-Type": "application/json"}


def call(port: int, path: str, body: object = None, headers: dict | None = None, method: str = "", wait=120) -> tuple:
    """Status, headers and body of one HTTP request; bytes are sent as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=wait)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, data, JSON | (headers or {}))
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def wait_until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")


GOOD = {"model": "parrot", "prompt": "1234", "max_tokens": 2}

SAID = {"model": "parrot", "messages": [{"role": "user", "content": "1234"}], "max_tokens": 2}
