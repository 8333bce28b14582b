"""Two vLLM servers at once: they share a prompt, they share a ticket, a client leaves one, and one dies in a transfer.

    python -m tests.vllm.decoders FOLDER VLLM_PYTHON PREFILL_PORT SHORT_LEASE_PORT

PREFILL_PORT: a server of two ranks; SHORT_LEASE_PORT: one whose leases end after 2 seconds.
"""

import http.client
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from .proxy import fetched
from .relay import Hang, through
from .servers import ROOT, Server, check, metric, post, settled, start_vllm, ticket

ROWS = "vllm:context_parallel_rows_total"
FAILED = "vllm:context_parallel_failures_total"


def decode(server: Server, text: dict, params: dict) -> bool:
    """Whether a server's answer to a prompt with a ticket is transformers'."""
    asked = {"prompt": text["prompt"], "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    status, answer = post(server.port, asked | {"kv_transfer_params": params})
    return status == 200 and answer["choices"][0]["token_ids"] == text["answer"]


def ends(port: int) -> dict[str, float]:
    """How many leases of a prefill server have ended, by how they did."""
    return {end: metric(port, "handoffs_total", f'end="{end}"') for end in ("reported", "expired")}


def at_once(decoders: list[Server], text: dict, tickets: list[dict]) -> int:
    """How many decoders give the right text when they decode it at once, each with its ticket."""
    with ThreadPoolExecutor(len(decoders)) as threads:
        return sum(threads.map(lambda server, params: decode(server, text, params), decoders, tickets))


def one_prompt(decoders: list[Server], port: int, text: dict) -> None:
    """Two tickets of a prompt: our ranks prefill it once, and each decoder gets all of its rows."""
    tokens = len(text["prompt"])
    sent, leases = metric(port, "handoff_rows_total"), ends(port)
    first = ticket(port, text["prompt"])
    check("one prompt: pinned", settled(port, "handoffs_pinned", 1), 1)
    cached = metric(port, "vllm:prompt_tokens_cached_total")
    tickets = [first, ticket(port, text["prompt"])]
    check("one prompt: right texts of two decoders at once", at_once(decoders, text, tickets), 2)
    check("one prompt: fetched by each", [fetched(server.port) for server in decoders], [tokens, tokens])
    check("one prompt: failed loads", [metric(server.port, FAILED) for server in decoders], [0, 0])
    check("one prompt: rows sent", settled(port, "handoff_rows_total", sent + 2 * tokens) - sent, 2 * tokens)
    reused = metric(port, "vllm:prompt_tokens_cached_total") - cached
    check("one prompt: prefilled once", reused >= tokens - 1, True)
    check("one prompt: pinned at last", settled(port, "handoffs_pinned", 0), 0)
    check("one prompt: leases", ends(port), leases | {"reported": leases["reported"] + 2})


def one_ticket(decoders: list[Server], port: int, text: dict) -> None:
    """A ticket is for one decoder: whoever reports first ends its lease, and another one computes the prompt."""
    leases, failed = ends(port), sum(metric(server.port, FAILED) for server in decoders)
    params = ticket(port, text["prompt"])
    check("one ticket: right texts of two decoders at once", at_once(decoders, text, [params, params]), 2)
    check("one ticket: right text of a late decoder", decode(decoders[1], text, params), True)
    failed = sum(metric(server.port, FAILED) for server in decoders) - failed
    check("one ticket: the late one computed it", failed in (1, 2), True)
    check("one ticket: pinned at last", settled(port, "handoffs_pinned", 0), 0)
    check("one ticket: leases", ends(port), leases | {"reported": leases["reported"] + 1})


def client_leaves(server: Server, port: int, text: dict) -> None:
    """A client leaves vLLM while rows come: the load is given up, and the lease ends long before its time."""
    leases, begin, hang = ends(port), time.monotonic(), Hang()
    params = through(ticket(port, text["prompt"]), 1, hang)
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"model": "model", "prompt": text["prompt"], "max_tokens": 24, "kv_transfer_params": params}
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    check("a client leaves: in the middle of a transfer", hang.begun.wait(20), True)
    client.close()
    reported = leases["reported"] + 1
    check("a client leaves: its lease", settled(port, "handoffs_total", reported, 20, 'end="reported"'), reported)
    check("a client leaves: within 20 s of 120", time.monotonic() - begin < 20, True)
    check("a client leaves: the next text", decode(server, text, ticket(port, text["prompt"])), True)


def decoder_dies(decoders: list[Server], port: int, text: dict) -> None:
    """A vLLM is killed while rows come: the lease ends by time, and our server goes on."""
    leases, hang = ends(port), Hang()
    params = through(ticket(port, text["prompt"]), 1, hang)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(decode, decoders[0], text, params)
        check("a decoder dies: in the middle of a transfer", hang.begun.wait(20), True)
        check("a decoder dies: pinned", settled(port, "handoffs_pinned", 1, 1), 1)
        decoders[0].kill()
    check("a decoder dies: pinned at last", settled(port, "handoffs_pinned", 0), 0)
    check("a decoder dies: leases", ends(port), leases | {"expired": leases["expired"] + 1})
    status, _ = post(port, {"prompt": [*reversed(text["prompt"])], "max_tokens": 900})
    check("a decoder dies: a request that needs most of the cache", status, 200)
    check("a decoder dies: the other decoder", decode(decoders[1], text, ticket(port, text["prompt"])), True)


def main(folder: Path, python: str, port: int, short: int) -> None:
    text = json.loads((folder / "texts.json").read_text())[-1]
    os.environ["PYTHONPATH"] = str(ROOT)
    with ExitStack() as stack:
        decoders = [start_vllm(stack, python, folder, name) for name in ("first", "second")]
        for server in decoders:
            server.wait_until_ready()
        one_prompt(decoders, port, text)
        one_ticket(decoders, port, text)
        client_leaves(decoders[1], port, text)
        decoder_dies(decoders, short, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]))
