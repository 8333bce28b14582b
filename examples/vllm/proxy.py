"""A proxy before our prefill servers and vLLM: it has prompts prefilled, and vLLM decodes them.

    python examples/vllm/proxy.py --port 8000 --prefill http://127.0.0.1:5000 --decode http://127.0.0.1:8100

If a prefill server refuses or does not answer, vLLM gets the request as it came, and computes the prompt itself. Run it
in vLLM's environment, which has httpx, starlette and uvicorn. Clients must reach vLLM through the proxy only: it
refuses tickets of clients, because a ticket decides which keys and values vLLM uses.
"""

import argparse
import itertools
import json
import logging
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

log = logging.getLogger("proxy")
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
FOR_PREFILL = ("model", "prompt", "messages")  # nothing else decides keys and values
OURS = "the body must be an object of JSON without kv_transfer_params, which the proxy adds"


class Proxy:
    """Forwards requests, in turn to the servers of each kind.

    Args:
        prefill, decode: base URLs of the servers.
        shortest: bytes of a request; shorter ones are not prefilled elsewhere.
        seconds: how long a prefill server may take to begin.
    """

    def __init__(self, prefill: list[str], decode: list[str], shortest: int, seconds: float) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._shortest = shortest
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5))
        self._patience = httpx.Timeout(seconds, connect=2)
        self.fallbacks = 0

    def app(self) -> Starlette:
        """The application."""
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self.generate, methods=["POST"]) for path in paths]
        routes += [Route(path, self.forward) for path in ("/v1/models", "/health", "/metrics")]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self._client.aclose()

        return Starlette(routes=routes, lifespan=lifespan)

    async def generate(self, request: Request) -> Response:
        """A completion: its prompt from a prefill server, its text from vLLM."""
        data = await request.body()
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if not isinstance(body, dict) or "kv_transfer_params" in body:
            return JSONResponse({"error": {"message": OURS, "type": "invalid_request_error"}}, 400)
        headers = {"X-Request-Id": request.headers.get("x-request-id", uuid.uuid4().hex)}
        if len(data) >= self._shortest and (ticket := await self._ticket(request.url.path, body, headers)):
            body["kv_transfer_params"] = ticket
        return await self._answer("POST", request, headers, json.dumps(body).encode())

    async def forward(self, request: Request) -> Response:
        """What vLLM says."""
        return await self._answer("GET", request, {}, None)

    async def _ticket(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        """The ticket for a prompt; None if no prefill server gives one."""
        server = next(self._prefill)
        asked = {name: body[name] for name in FOR_PREFILL if name in body}
        asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": WANTED}
        if key := os.environ.get("PREFILL_API_KEY"):
            headers = headers | {"Authorization": f"Bearer {key}"}
        try:
            answer = await self._client.post(server + path, json=asked, headers=headers, timeout=self._patience)
            answer.raise_for_status()
            return answer.json()["kv_transfer_params"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.fallbacks += 1
            why = f"{type(error).__name__}: {error}"[:200]
            log.warning("%s", json.dumps({"request": headers["X-Request-Id"], "prefill": server, "fallback": why}))
            return None

    async def _answer(self, method: str, request: Request, headers: dict[str, str], data: bytes | None) -> Response:
        """vLLM's answer, as it comes. If the client disconnects, so does the proxy, and vLLM ends the text."""
        for name in ("authorization", "content-type"):
            if name in request.headers:
                headers[name] = request.headers[name]
        asked = self._client.build_request(method, next(self._decode) + request.url.path, content=data, headers=headers)
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            why = f"vLLM does not answer ({type(error).__name__})"
            return JSONResponse({"error": {"message": why, "type": "server_error"}}, 502)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        kept = {name: answer.headers[name] for name in ("content-type", "content-encoding") if name in answer.headers}
        return StreamingResponse(parts(), answer.status_code, kept)


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="prefill servers")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="vLLM servers")
    parser.add_argument("--shortest", type=int, default=0, help="bytes; vLLM computes shorter requests alone")
    parser.add_argument("--prefill-seconds", type=float, default=30, help="time for a prefill server to begin")
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    proxy = Proxy(given.prefill, given.decode, given.shortest, given.prefill_seconds)
    uvicorn.run(proxy.app(), host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
