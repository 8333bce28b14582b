"""Limits on client connections: how many, and how long a client may delay the server."""

import asyncio
import logging
import os
import resource
import socket
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.context_parallel.errors import UsageError

log = logging.getLogger(__name__)
_SPARE = 64  # further connections, which get status 503; beyond them, none are accepted
_FILES = 128  # reserved for the rest of the process
_PAUSE = 0.1  # seconds until the server checks again whether it may accept


@dataclass(frozen=True)
class Patience:
    """The limits on connections.

    Attributes:
        connections: maximum number at once; further ones get status 503, and beyond that they wait.
        idle_seconds: how long an idle connection stays open.
        client_seconds: time limit for a client to send a request, and to receive a response.
    """

    connections: int = 512
    idle_seconds: int = 5
    client_seconds: int = 60

    def check_files(self) -> None:
        """Raise this process's limit of open files to what connections need.

        Raises:
            UsageError: the system allows fewer.
        """
        others = len(os.listdir("/proc/self/fd")) + _SPARE + _FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and self.connections + others > hard:
            why = f"needs {self.connections + others} open files, but ulimit -Hn is {hard}"
            raise UsageError(f"--limit-concurrency {self.connections}: {why}; give {max(1, hard - others)}")
        if soft != resource.RLIM_INFINITY and self.connections + others > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.connections + others, hard))


class Server(uvicorn.Server):
    """uvicorn with our own accept loop: asyncio accepts without limit, and floods the log when files run out."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, patience: Patience) -> None:
        super().__init__(config)
        self.listener, self.patience = listener, patience

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self.listener.close()
        await super().shutdown(sockets=[])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self.server_state.connections) >= self.patience.connections + _SPARE:
                await asyncio.sleep(_PAUSE)  # further connections wait in the system's queue
            try:
                client, _ = await loop.sock_accept(self.listener)
                await loop.connect_accepted_socket(self._connection, client)
            except OSError as error:  # too many open files, or the client has already disconnected
                log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(_PAUSE)

    def _connection(self) -> asyncio.Protocol:
        return ClientConnection(self.patience.client_seconds, config=self.config, server_state=self.server_state)


class ClientConnection(H11Protocol):
    """Closes if its client takes longer than `seconds` to send a request, or to receive the response."""

    def __init__(self, seconds: float, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn, app_state={})
        self._request, self._taken = _Deadline(self, seconds), _Deadline(self, seconds)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause writing as soon as the client does not receive everything
        self._request.begin()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._request.begin()
        else:
            self._request.end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the next request has started to arrive, or the body is incomplete
            self._request.begin()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taken.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken.end()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._request.end()
        self._taken.end()


class _Deadline:
    """Closes a connection, unless its current operation ends in time."""

    def __init__(self, connection: H11Protocol, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if not self._timer:
            self._timer = self._connection.loop.call_later(self._seconds, self._connection.transport.abort)

    def end(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
