"""Runs the HTTP server in a thread, beside the main thread that generates."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from megatron.context_parallel.errors import UsageError

from .connections import Patience, Server
from .log_lines import write_log_lines

_SECONDS_TO_CLOSE = 5  # connections that are still open then are closed


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket; `flag` gave its port.

    Raises:
        UsageError: the address or port is not available.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = f"cannot listen on {host} ({error.strerror or error})"
        raise UsageError(f"{flag} {port}: {why}; give another, or 0 for any free port") from None


@contextmanager
def serve_in_thread(app: ASGIApp, listener: socket.socket, patience: Patience) -> Iterator[Callable[[], None]]:
    """Answers requests while the block runs. The last answers are sent when it ends, or at a call of what it yields.

    Raises:
        UsageError: the system allows fewer connections than `patience`.
        RuntimeError: the thread ended before it could answer. It has printed why.
    """
    patience.check_files()
    write_log_lines()
    config = uvicorn.Config(
        app,
        http="h11",  # `ClientConnection` needs it, even if other implementations are installed
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=patience.connections + 1,
        timeout_keep_alive=patience.idle_seconds,
        timeout_graceful_shutdown=_SECONDS_TO_CLOSE,
    )
    server = Server(config, listener, patience)
    thread = threading.Thread(target=server.run, name="http", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the thread that answers requests ended at its start; its error is printed above")
        time.sleep(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join(2 * _SECONDS_TO_CLOSE)

    try:
        yield stop
    finally:
        stop()
