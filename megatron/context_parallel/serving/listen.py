"""Runs the HTTP side in a thread, beside the main thread that generates."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from megatron.context_parallel.errors import UsageError

from .connections import Patience, Server
from .log_lines import write_log_lines

_SECONDS_TO_CLOSE = 5  # connections that are still open then are cut


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: nothing can listen there.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = f"cannot listen at {host} ({error.strerror or error})"
        raise UsageError(f"--port {port}: {why}; give another, or 0 for any that is free") from None


@contextmanager
def serve_in_thread(app: ASGIApp, listener: socket.socket, patience: Patience) -> Iterator[Callable[[], None]]:
    """Requests are answered while the block runs; then, or when what it gets is called, the last answers are sent.

    Raises:
        UsageError: the system allows fewer connections than `patience` does.
    """
    patience.check_files()
    write_log_lines()
    config = uvicorn.Config(
        app,
        http="h11",  # `ClientConnection` is made for it, whatever else is installed
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

    def stop() -> None:
        server.should_exit = True
        thread.join(2 * _SECONDS_TO_CLOSE)

    try:
        yield stop
    finally:
        stop()
