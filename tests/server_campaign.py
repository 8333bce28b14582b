"""The server with a rank that is stopped, and under load: 200 clients at once, of whom some leave, then 1,000 requests.

Memory must stay flat.

PYTHONPATH=tests:. python tests/server_campaign.py
"""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_case
import psutil
from test_server import GOOD, call, serving, wait_until

CLIENTS, REQUESTS = 200, 1000


def ask(port: int, number: int) -> str:
    """One client: a text, a stream, something malformed, or one that leaves."""
    draw = random.Random(number)
    body = GOOD | {"prompt": f"{number} " * draw.randint(1, 30), "max_tokens": draw.randint(1, 40)}
    kind = draw.choice(["whole", "stream", "wrong", "leaves"])
    if kind == "wrong":
        return f"wrong {call(port, '/v1/completions', body | {'n': 0})[0]}"
    if kind == "whole":
        status, _, text = call(port, "/v1/completions", body)
        assert status != 200 or json.loads(text)["usage"]["completion_tokens"] == body["max_tokens"]
        return f"whole {status}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    answer = connection.getresponse()
    if kind == "leaves":
        connection.close()
        return f"leaves {answer.status}"
    text = answer.read().decode()
    assert answer.status != 200 or text.endswith("data: [DONE]\n\n")
    return f"stream {answer.status}"


def check_stopped_rank(victim: int, limit: int = 8) -> None:
    """A real server of 3 ranks of which one is stopped: readiness, the stream of a client, and the last words."""
    port, folder = free_port(), Path(tempfile.mkdtemp())
    llama_case.save_llama(folder, "llama3", vocab_size=259)
    llama_case.save_tokenizer(folder, chat=False)
    flags = ["--load", str(folder), "--port", str(port), "--distributed-timeout-seconds-after-init", str(limit)]
    settings = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    settings["MASTER_PORT"] = str(free_port())
    program, errors = ["tools/run_text_generation_server.py", *flags], (folder / "errors").open("w+")
    ranks = [
        subprocess.Popen([sys.executable, *program], env=os.environ | settings | {"RANK": str(rank)}, stderr=errors)
        for rank in range(3)
    ]
    try:
        while ready(port) != 200:
            time.sleep(0.5)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": folder.name, "prompt": "abc", "max_tokens": 400, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        answer.readline()
        ranks[victim].send_signal(signal.SIGSTOP)
        if victim:
            wait_until(lambda: ready(port) == 503)
            assert "a rank of the server failed" in answer.read().decode()
        statuses = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors.seek(0)
    (said,) = [line for line in errors if f"rank {victim} stopped responding at iteration " in line]
    assert statuses == [-signal.SIGKILL if rank == victim else 1 for rank in range(3)]
    print("a stopped rank:", said.strip())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def ready(port: int) -> int:
    """The status of /ready; 0 where nobody answers."""
    try:
        return call(port, "/ready")[0]
    except OSError:
        return 0


def main() -> None:
    for victim in (0, 2):
        check_stopped_rank(victim)
    with serving(most=100, cache=4000) as (worker, port, _), ThreadPoolExecutor(CLIENTS) as clients:
        engine, process = worker.loop.engine, psutil.Process()
        print("200 clients at once:", dict(Counter(clients.map(lambda i: ask(port, i), range(CLIENTS)))))
        wait_until(lambda: engine.idle and not worker._deliver)
        memory = []
        for part in range(5):
            first = CLIENTS + part * REQUESTS // 5
            found = Counter(clients.map(lambda i: ask(port, i), range(first, first + REQUESTS // 5)))
            wait_until(lambda: engine.idle and not worker._deliver)
            memory.append(process.memory_info().rss // 2**20)
            print(f"{(part + 1) * REQUESTS // 5} requests: {memory[-1]} MiB, {dict(found)}")
        assert memory[-1] - memory[1] < 20, "memory grows"
        for sequence in [*engine._kept]:
            engine._forget(sequence)
        assert engine.cache.room() == engine.capacity and not engine._prefixes._holders
        print("the cache is empty, and nothing waits")


if __name__ == "__main__":
    main()
