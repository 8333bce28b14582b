"""The server under load: 200 clients at once, of whom some leave, then 1,000 requests; memory must stay flat.

PYTHONPATH=tests:. python tests/server_campaign.py
"""

import http.client
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

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


def main() -> None:
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
