"""Runs in vLLM's environment: transfers that fail. The tokens must be right, and nothing may wait forever.

    python -m tests.vllm.failures FOLDER PORT SHORT_LEASE_PORT TORCHRUN_PID

PORT: a server of two ranks, started by the process TORCHRUN_PID, which is ended at last; SHORT_LEASE_PORT: a server
whose leases end after 2 seconds.
"""

import copy
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .decode import check, counts, decode, difference, equal_tokens, metric, post, settled, start, ticket

FIELD = "context_parallel"
Spoil = Callable[[bytearray, int], bytes | None]  # what passes of the bytes that came after so many; None: the end


class Relay:
    """Stands between a decoder and a rank, and spoils what the rank sends."""

    def __init__(self, host: str, port: int, spoil: Spoil) -> None:
        self._rank, self._spoil = (host, port), spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            decoder, _ = self._listener.accept()
            rank = socket.create_connection(self._rank)
            threading.Thread(target=self._forward, args=(decoder, rank), daemon=True).start()
            threading.Thread(target=self._return, args=(rank, decoder), daemon=True).start()

    def _forward(self, decoder: socket.socket, rank: socket.socket) -> None:
        try:
            while data := decoder.recv(4096):
                rank.sendall(data)
            rank.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _return(self, rank: socket.socket, decoder: socket.socket) -> None:
        passed = 0
        try:
            while data := rank.recv(4096):
                sent = self._spoil(bytearray(data), passed)
                if sent is None:
                    break
                decoder.sendall(sent)
                passed += len(data)
        except OSError:
            pass
        decoder.shutdown(socket.SHUT_RDWR)  # another thread still waits for it


def cut(data: bytearray, passed: int) -> bytes | None:
    return None if passed > 100_000 else bytes(data)


def hang(data: bytearray, passed: int) -> bytes | None:
    if passed > 100_000:
        time.sleep(60)
    return bytes(data)


def damage(data: bytearray, passed: int) -> bytes | None:
    if passed <= 50_000 < passed + len(data):
        data[0] ^= 1
    return bytes(data)


def through(params: dict, rank: int, spoil: Spoil) -> dict:
    """A ticket whose rows of one rank go through a relay."""
    spoiled = copy.deepcopy(params)
    place = spoiled[FIELD]["places"][rank]
    place["port"], place["host"] = Relay(place["host"], place["port"], spoil).port, "127.0.0.1"
    return spoiled


def changed(params: dict, **fields: object) -> dict:
    spoiled = copy.deepcopy(params)
    spoiled[FIELD] |= fields
    return spoiled


def with_model(params: dict, **fields: object) -> dict:
    return changed(params, model=params[FIELD]["model"] | fields)


def absent(params: dict) -> dict:
    spoiled = copy.deepcopy(params)
    with socket.create_server(("127.0.0.1", 0)) as free:
        spoiled[FIELD]["places"][1]["port"] = free.getsockname()[1]
    return spoiled


def other_heads(params: dict) -> dict:
    spoiled = copy.deepcopy(params)
    spoiled[FIELD]["places"][1] |= {"first_head": 1, "heads": 1}
    return spoiled


def late(params: dict) -> dict:
    time.sleep(3.5)
    return params


# For each case: what is done to a ticket, and whether vLLM counts a failed load (else it does not try).
CASES = {
    "a rank is absent": (absent, 1),
    "the first rank is lost while it sends": (lambda params: through(params, 0, cut), 1),
    "the second rank is lost while it sends": (lambda params: through(params, 1, cut), 1),
    "a rank hangs": (lambda params: through(params, 1, hang), 1),
    "a byte is damaged": (lambda params: through(params, 1, damage), 1),
    "a rank has other heads": (other_heads, 1),
    "an unknown sequence": (lambda params: changed(params, id="0" * 32), 1),
    "another prompt": (lambda params: changed(params, tokens_digest="0" * 32), 0),
    "fewer tokens": (lambda params: changed(params, tokens=699), 0),
    "other weights": (lambda params: with_model(params, weights="0" * 32), 0),
    "another dtype": (lambda params: with_model(params, dtype="bfloat16"), 0),
    "another rope": (lambda params: with_model(params, rope={"rope_theta": 10000.0}), 0),
    "another version": (lambda params: changed(params, version=2), 0),
    "no ticket at all": (lambda params: changed(params, places="nowhere"), 0),
}


def recomputed(llm: object, what: str, text: dict, params: dict, failures: int) -> None:
    """Decode beside a sound request: both texts are right, in time, and the failure is counted."""
    llm.reset_prefix_cache()
    before, begin = counts(llm), time.monotonic()
    outputs = decode(llm, [text["prompt"], text["prompt"][:50]], [params, None])
    seconds = time.monotonic() - begin
    equal_tokens(what, outputs[:1], [text])
    found = difference(counts(llm), before)
    check(f"{what}: failed loads", found.get("failures_total", found.get("failures", 0)), failures)
    check(f"{what}: within 20 s", seconds < 20, True)


def main(folder: Path, port: int, short: int, torchrun: int) -> None:
    text = json.loads((folder / "texts.json").read_text())[-1]
    llm = start(folder, 1, 32, silence=3)
    for what, (spoil, failures) in CASES.items():
        recomputed(llm, what, text, spoil(ticket(port, text["prompt"])), failures)
    recomputed(llm, "its lease is over", text, late(ticket(short, text["prompt"])), 1)
    client_gone(short, text)
    rank_killed(llm, port, text, torchrun)


def client_gone(port: int, text: dict) -> None:
    """Nobody decodes: the lease ends by time, and the pages are free for others."""
    before = metric(port, "handoffs_total")
    for _ in range(5):
        ticket(port, text["prompt"])
    check("client gone: leases that ended", settled(port, "handoffs_total", before + 5) - before, 5)
    check("client gone: pinned", settled(port, "handoffs_pinned", 0), 0)
    whole = post(
        f"http://127.0.0.1:{port}", {"model": "model", "prompt": text["prompt"], "max_tokens": 900, "temperature": 0}
    )
    check("client gone: a request that needs most of the cache", len(whole["choices"]), 1)


def rank_killed(llm: object, port: int, text: dict, torchrun: int) -> None:
    """A rank is killed between prefill and decode; then the whole server ends."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    params = ticket(port, text["prompt"])
    os.kill(int(children[1]), signal.SIGKILL)
    time.sleep(1)
    recomputed(llm, "a rank is killed", text, params, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
