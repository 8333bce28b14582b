"""The HTTP server: routes, keys, limits, streams and logs."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.context_parallel.inference.request import RequestOutput

from .handoff import Tickets
from .hosts import check_host
from .protocol import AnyBody, Body, Chat, Completion, Detokenize, Refused, Tokenize, check_model
from .reader import Reader, reader_of
from .reply import Chats, Completions, Texts
from .requests import requests_of
from .token_texts import TokenTexts
from .worker import Worker

log = logging.getLogger(__name__)
Answer = Callable[[HttpRequest], Awaitable[Response]]
_CLIENT_GONE = 499  # only for the log
_SHOWN = 200  # maximum characters of client input in a log line
_ROUTES = "/v1/chat/completions, /v1/completions, /v1/models, /tokenize or /detokenize"
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")  # W3C's traceparent
_BODIES = 16  # maximum bodies of the largest size in memory


@dataclass(frozen=True)
class Settings:
    """The settings of the server.

    Attributes:
        model: the model name in the API.
        keys: the accepted API keys; if empty, no key is needed.
        hosts: accepted host names, in lower case, besides addresses; "*": all.
        body_bytes: maximum bytes of a request.
        new_tokens: default maximum tokens of a chat answer.
    """

    model: str
    keys: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset(["localhost"])
    body_bytes: int = 1 << 24
    new_tokens: int = 1024


class Service:
    """The routes of a server.

    Args:
        worker: generates the texts.
        settings: the settings of the server.
        readers: the readers of short and of long requests.
        tickets: makes tickets of handed sequences, if the engine hands any over.
    """

    def __init__(
        self, worker: Worker, settings: Settings, readers: tuple[Reader, Reader], tickets: Tickets | None = None
    ) -> None:
        self.worker, self.settings, self.readers, self.tickets = worker, settings, readers, tickets
        self.started = int(time.time())
        self.token_texts = TokenTexts(worker.loop.engine.tokenizer.pieces)
        self._held = 0

    def app(self) -> ASGIApp:
        """The application for an ASGI server such as uvicorn."""
        answers: dict[str, tuple[Answer, str]] = {
            "/v1/completions": (self.completions, "POST"),
            "/v1/chat/completions": (self.chat, "POST"),
            "/tokenize": (self.tokenize, "POST"),
            "/detokenize": (self.detokenize, "POST"),
            "/v1/models": (self.models, "GET"),
            "/v1/models/{name:path}": (self.models, "GET"),
            "/health": (self.health, "GET"),
            "/ready": (self.ready, "GET"),
            "/metrics": (self.metrics, "GET"),
        }
        routes = [
            Route(path + slash, self._at_our_name(answer), methods=[method])
            for path, (answer, method) in answers.items()
            for slash in ("/", "")  # a model's name may have slashes, but not at its end
        ]
        handlers = {
            Refused: self.refuse,
            HTTPException: self.refuse_route,
            ClientDisconnect: self.gone,
            Exception: self.broken,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # to http, also behind a TLS proxy, and to any Host
        return Logged(app)

    # -- short answers -----------------------------------------------------------------------------------------------

    async def health(self, request: HttpRequest) -> Response:
        """Whether the process is alive."""
        return JSONResponse({"status": "alive"})

    async def ready(self, request: HttpRequest) -> Response:
        """Whether the server accepts requests."""
        if why := self.worker.takes_nothing():
            return JSONResponse({"status": why}, 503)
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(self.worker.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: HttpRequest) -> Response:
        self._key(request)
        model = {"id": self.settings.model, "object": "model", "created": self.started, "owned_by": "local"}
        model["max_model_len"] = self.worker.loop.engine.length
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        check_model(request.path_params["name"], self.settings.model)
        return JSONResponse(model)

    async def refuse(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, Refused)
        self.worker.metrics.refused.labels(str(error.status)).inc()
        return JSONResponse(error.body, error.status, headers=error.headers)

    async def refuse_route(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        why = f"not a route of this server; use {_ROUTES}"
        if error.status_code == 405:
            why = f"use {' or '.join(sorted(headers['Allow'].split(', ')))}"
        where = f"{request.method} {request.scope['path'][:100]!r}"
        return await self.refuse(request, Refused(error.status_code, f"{where}: {why}", headers=headers))

    async def gone(self, request: HttpRequest, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    async def broken(self, request: HttpRequest, error: Exception) -> Response:
        """An internal error; its traceback is logged."""
        return await self.refuse(request, Refused(500, "internal error of the server", kind="server_error"))

    # -- texts ---------------------------------------------------------------------------------------------------------

    async def completions(self, request: HttpRequest) -> Response:
        return await self._answer(request, Completion, Completions, "cmpl")

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, Chat, Chats, "chatcmpl")

    async def _answer(self, request: HttpRequest, kind: type[Body], reply: type, prefix: str) -> Response:
        key = self._key(request)
        body, prompts = await self._read(request, kind)
        assert isinstance(body, Body)
        engine = self.worker.loop.engine
        name = f"{prefix}-{uuid.uuid4().hex}"
        requests = await run_in_threadpool(requests_of, body, prompts, name, key, engine, self.settings.new_tokens)
        logprobs = body.logprobs_returned is not None
        calls = body.call_reader() if isinstance(body, Chat) else None
        model, decode = self.settings.model, engine.tokenizer.decode
        how = logprobs, decode, self.token_texts, body.echoes, bool(body.return_token_ids), calls
        texts = reply(name, model, requests, body.n or 1, *how)
        request.state.texts = texts
        arriving = asyncio.Queue[RequestOutput]()
        loop = asyncio.get_running_loop()
        self.worker.submit(requests, lambda output: loop.call_soon_threadsafe(arriving.put_nowait, output))
        if body.stream:
            chunks = self._stream(texts, arriving, body.streams_usage)
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(request, texts, arriving)

    async def tokenize(self, request: HttpRequest) -> Response:
        """The tokens of a prompt or of messages, as with vLLM."""
        self._key(request)
        body, (tokens,) = await self._read(request, Tokenize)
        assert isinstance(body, Tokenize)
        texts = [self.token_texts.text(token) for token in tokens] if body.return_token_strs else None
        length = self.worker.loop.engine.length
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, request: HttpRequest) -> Response:
        """The text of tokens, as with vLLM."""
        self._key(request)
        _, (tokens,) = await self._read(request, Detokenize)
        vocabulary = self.worker.loop.engine.cache.vocabulary
        if wrong := [token for token in tokens if token >= vocabulary]:
            why = f"tokens: token {wrong[0]}; the vocabulary is 0 to {vocabulary - 1}"
            raise Refused(400, why, param="tokens")
        text = await run_in_threadpool(self.worker.loop.engine.tokenizer.decode, tokens)
        return JSONResponse({"prompt": text})

    async def _read(self, request: HttpRequest, kind: type[AnyBody]) -> tuple[AnyBody, list[list[int]]]:
        _check_content_type(request.headers.get("content-type", ""))
        async with self._body(request) as data:
            return await reader_of(self.readers, data).read(kind, data)

    async def _whole(self, request: HttpRequest, texts: Texts, arriving: asyncio.Queue[RequestOutput]) -> Response:
        """The answer when all texts are complete. If the client disconnects before, they are cancelled."""
        leaving = asyncio.ensure_future(request.receive())  # after the body, the only message is a disconnect
        try:
            while texts.unfinished:
                coming = asyncio.ensure_future(arriving.get())
                await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    raise ClientDisconnect
                output = coming.result()
                self._check_end(output)
                texts.add(output)
        finally:
            leaving.cancel()
            self.worker.cancel(texts.unfinished)
        return await run_in_threadpool(lambda: JSONResponse(self._full(texts)))  # slow with many log-probabilities

    def _full(self, texts: Texts) -> dict:
        request = texts.requests[0]
        ticket = {"kv_transfer_params": self.tickets.params(request)} if self.tickets and request.handoff else {}
        return texts.whole() | ticket

    async def _stream(self, texts: Texts, arriving: asyncio.Queue[RequestOutput], usage: bool) -> AsyncIterator[str]:
        """The events of a stream. If the client disconnects, the texts are cancelled."""
        try:
            for chunk in texts.first():
                yield _event(chunk, usage)
            while texts.unfinished:
                output = await arriving.get()
                try:
                    self._check_end(output)
                except Refused as error:
                    texts.add(output)
                    yield _event(error.body, False)
                    return
                i = texts.add(output)
                yield _event(texts.chunk(i, output), usage)  # each token, also if its text is not final yet
            if usage:
                yield _event(texts.last(), False)
            yield "data: [DONE]\n\n"
        finally:
            self.worker.cancel(texts.unfinished)

    def _check_end(self, output: RequestOutput) -> None:
        if output.finish == "cancelled":
            raise Refused(503, output.why or "the server stopped before the end of the text", kind="server_error")
        if output.finish == "error":
            raise Refused(500, output.why, kind="server_error")

    # -- access and limits ---------------------------------------------------------------------------------------------

    def _key(self, request: HttpRequest) -> str:
        """A hash of the client's key; "" if no key is needed."""
        if not self.settings.keys:
            return ""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # All keys are compared, each in constant time.
        found = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.settings.keys]
        if scheme.lower() != "bearer" or not any(found):
            raise Refused(
                401,
                "a key is required; send the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return hashlib.sha256(given.strip().encode()).hexdigest()

    def _at_our_name(self, answer: Answer) -> Answer:
        """Answers only requests to a name of this server, not to another name that resolves to it."""

        async def checked(request: HttpRequest) -> Response:
            check_host(request.headers.get("host", ""), self.settings.hosts)
            return await answer(request)

        return checked

    @asynccontextmanager
    async def _body(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """The body of a request. The bodies in memory have a total limit too."""
        most = self.settings.body_bytes
        body = bytearray()
        too_long = Refused(413, f"the body has more than {most} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_long
        try:
            async for part in request.stream():
                body += part
                self._held += len(part)
                if len(body) > most:
                    raise too_long
                if self._held > _BODIES * most:
                    why = f"the server already has {_BODIES * most} bytes of requests in memory"
                    raise Refused(503, why, kind="server_error", headers={"Retry-After": "1"})
            yield bytes(body)
        finally:
            self._held -= len(body)


def _check_content_type(given: str) -> None:
    """Reject content types that a web page may send to other sites without permission. JSON is not one of them."""
    if given.partition(";")[0].strip().lower() != "application/json":
        why = f"Content-Type {given[:100]!r}: send the body as application/json"
        raise Refused(415, why)


def _event(chunk: dict, usage: bool) -> str:
    """A chunk as an event; with `usage`, all but the last have null counts."""
    return f"data: {json.dumps(chunk | ({'usage': None} if usage else {}))}\n\n"


class Logged:
    """Gives each HTTP request an id, and logs a line of JSON when it ends: counts and times, no texts."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        name = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            texts = scope.get("state", {}).get("texts")
            line = {
                "request": name,
                "method": scope["method"][:_SHOWN],
                "path": scope["path"][:_SHOWN],
                "status": status,
                "seconds": round(time.monotonic() - started, 4),
            }
            if trace := _TRACE.fullmatch(headers.get(b"traceparent", "")):
                line |= {"trace_id": trace[1], "parent_id": trace[2]}
            if texts:
                line |= {"id": texts.name, **texts.usage, "complete": not texts.unfinished}
            log.info(json.dumps(line))
