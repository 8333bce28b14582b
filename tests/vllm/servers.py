"""Starts servers, asks them over HTTP, and checks what they say. It needs no vLLM."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@dataclass
class Server:
    """A process that soon answers at a port. It ends with the stack."""

    words: list[str]
    port: int
    log: Path
    stack: InitVar[ExitStack]

    def __post_init__(self, stack: ExitStack) -> None:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(self.words, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        stack.callback(self.end)

    def wait_until_ready(self) -> None:
        for _ in range(600):
            try:
                get(self.port, "/health")
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # vLLM loses a signal that comes while it starts
            self.kill()
            self.process.wait()

    def kill(self) -> None:
        """End it and its children at once."""
        os.killpg(self.process.pid, signal.SIGKILL)


def start_vllm(stack: ExitStack, python: str, folder: Path, name: str, **connector: str) -> Server:
    """Start vLLM's server with our connector and without a prefix cache."""
    port = free_port()
    given = json.loads((ROOT / "examples/vllm/connector.json").read_text()) | connector
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    words += ["--served-model-name", "model", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    words += ["--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]
    return Server([*words, "--kv-transfer-config", json.dumps(given)], port, folder / f"{name}.log", stack)


def start_proxy(stack: ExitStack, python: str, folder: Path, prefill: int, decode: int) -> Server:
    """Start the proxy before these two; it waits for the prefill server for 2 seconds."""
    port = free_port()
    words = [python, "examples/vllm/proxy.py", "--port", str(port), "--prefill", f"http://127.0.0.1:{prefill}"]
    words += ["--decode", f"http://127.0.0.1:{decode}", "--prefill-seconds", "2"]
    return Server(words, port, folder / f"proxy{port}.log", stack)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def post(port: int, body: dict, host: str = "127.0.0.1") -> tuple[int, dict]:
    """Status and answer of a greedy completion."""
    data = json.dumps({"model": "model", "temperature": 0} | body).encode()
    url = f"http://{host}:{port}/v1/completions"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ticket(port: int, prompt: list[int], host: str = "127.0.0.1") -> dict:
    """The ticket of a prompt that a server prefills."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
    body = {"prompt": prompt, "max_tokens": 1, "stream": False, "kv_transfer_params": wanted}
    status, answer = post(port, body, host)
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 0, answer
    return answer["kv_transfer_params"]


def metric(port: int, name: str, label: str = "") -> float:
    """The sum of a metric over its labels, or over those lines that have this label, such as `end="expired"`."""
    found = 0.0
    for line in get(port, "/metrics").splitlines():
        if line.partition("{")[0].partition(" ")[0] == name and label in line:
            found += float(line.split()[-1])
    return found


def settled(port: int, name: str, value: float, seconds: float = 10, label: str = "") -> float:
    """A metric when it has this value, or after some seconds."""
    end = time.monotonic() + seconds
    while (found := metric(port, name, label)) != value and time.monotonic() < end:
        time.sleep(0.1)
    return found


def check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise SystemExit(f"FAILED {what}: {found} instead of {expected}")
    print(f"ok {what}: {expected}", flush=True)
