"""A real server of 3 ranks of which one is stopped, or all get SIGTERM: which ranks notice, and what clients receive.

python -m tests.campaigns.stopped_server
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from tests.support import llama_case
from tests.support.server_case import JSON, call, wait_until
from tools.netlab import free_port


def check_stopped_rank(victim: int, limit: int = 8) -> None:
    """A real server of 3 ranks of which one is stopped: readiness, the stream of a client, and the last words."""
    port, folder, ranks, errors = start(limit)
    try:
        while ready(port) != 200:
            time.sleep(0.5)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": folder.name, "prompt": "abc", "max_tokens": 400, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
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


def start(limit: int, *more: str) -> tuple[int, Path, list[subprocess.Popen], IO[str]]:
    """A server: its port, its model, its ranks, and what they print."""
    port, folder = free_port(), Path(tempfile.mkdtemp())
    llama_case.save_llama(folder, "llama3", vocab_size=259)
    llama_case.save_tokenizer(folder, chat=False)
    flags = ["--load", str(folder), "--port", str(port), "--distributed-timeout-seconds-after-init", str(limit), *more]
    settings = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    settings["MASTER_PORT"] = str(free_port())
    command, errors = [sys.executable, "tools/run_text_generation_server.py", *flags], (folder / "errors").open("w+")
    ranks = [
        subprocess.Popen(command, env=os.environ | settings | {"RANK": str(rank)}, stdout=errors, stderr=errors)
        for rank in range(3)
    ]
    return port, folder, ranks, errors


def check_graceful_end(seconds: int) -> None:
    """SIGTERM while a text runs: it is finished, or ends with an error after `seconds`. The statuses are 0."""
    port, folder, ranks, errors = start(60, "--timeout-graceful-shutdown", str(seconds))
    try:
        while ready(port) != 200:
            time.sleep(0.5)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": folder.name, "prompt": "abc", "max_tokens": 400, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        answer = connection.getresponse()
        answer.readline()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        rest = answer.read().decode()
        statuses = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0, 0, 0]
    if seconds:
        assert rest.endswith("data: [DONE]\n\n") and rest.count("data: {") == 399
    else:
        assert "the server stopped before the end of the text" in rest
    errors.seek(0)
    said = errors.read()
    assert f"listening at http://127.0.0.1:{port}, model {folder.name}\n" in said and said.endswith("stopped\n")
    print(f"SIGTERM with {seconds} seconds: status 0")


def ready(port: int) -> int:
    """The status of /ready; 0 without an answer."""
    try:
        return call(port, "/ready")[0]
    except OSError:
        return 0


if __name__ == "__main__":
    for stopped in (0, 2):
        check_stopped_rank(stopped)
    for limit in (60, 0):
        check_graceful_end(limit)
