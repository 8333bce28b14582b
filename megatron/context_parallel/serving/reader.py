"""Reads requests in separate processes (JSON, chat template, tokens), with limits on CPU time and memory.

A chat template is a program, and a tokenizer has regular expressions: both can run forever, or use all memory.
"""

import asyncio
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from megatron.context_parallel.inference.tokenizer import Tokenizer

from .protocol import AnyBody, Limits, Refused, read

_SHORT = 1 << 16  # maximum bytes of a short body, which never waits for a longer one
_BYTES_A_SECOND = 1 << 18  # far below the speed of tokenizers
_SECONDS = 2  # for the shortest body
_MEMORY = 1 << 30  # bytes, in addition to an idle reader
_SECONDS_TO_START = 300  # for a large tokenizer on a slow disk
_AGAIN = {"Retry-After": "5"}
_BUSY = 30  # wall time limit in units of the CPU time limit, for a busy machine


class Reader:
    """A process that reads requests one by one. A request that exceeds its limits is refused, and ends only a fork.

    Args:
        tokenizer: the tokenizer of the model; it is copied.
        limits: the limits of requests.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._given = tokenizer, limits
        self._thread = ThreadPoolExecutor(1, "reader")
        self._start()

    async def read(self, kind: type[AnyBody], data: bytes) -> tuple[AnyBody, list[list[int]]]:
        """A request without its prompts, and the tokens of the prompts. It does not block the event loop.

        Raises:
            Refused: as `protocol.read`, or it exceeds the limits on CPU time or memory.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, kind, data)

    def close(self) -> None:
        """End the process; its fork ends with the pipe."""
        self._process.kill()
        self._pipe.close()
        self._thread.shutdown(cancel_futures=True)

    def _start(self) -> None:
        start = multiprocessing.get_context("spawn")
        self._pipe, theirs = start.Pipe()
        self._process = start.Process(target=_work, args=(theirs, *self._given), name="reader", daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def _read(self, kind: type[AnyBody], data: bytes) -> tuple[AnyBody, list[list[int]]]:
        seconds = _SECONDS + len(data) // _BYTES_A_SECOND
        try:
            if not self._ready:
                self._ready = self._answer(_SECONDS_TO_START)
            self._pipe.send((kind, data, seconds))
            answer = self._answer(_BUSY * seconds)
        except (EOFError, OSError):
            self._process.kill()
            self._pipe.close()
            self._start()
            raise Refused(503, "the reader of requests has ended", kind="server_error", headers=_AGAIN) from None
        if isinstance(answer, int):
            raise _ended(answer, seconds)
        if isinstance(answer, Refused):
            raise answer
        return answer

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise EOFError
        return self._pipe.recv()


@contextmanager
def reading(tokenizer: Tokenizer, limits: Limits) -> Iterator[tuple[Reader, Reader]]:
    """Readers of short and of long requests, until the block ends."""
    readers = Reader(tokenizer, limits), Reader(tokenizer, limits)
    try:
        yield readers
    finally:
        for reader in readers:
            reader.close()


def reader_of(readers: tuple[Reader, Reader], data: bytes) -> Reader:
    """Short requests wait only for short ones."""
    return readers[len(data) > _SHORT]


def _ended(status: int, seconds: float) -> Refused:
    """The error for a request whose fork ended."""
    if status == -signal.SIGTERM:
        return Refused(503, "the server is stopping", kind="server_error", headers=_AGAIN)
    if status == -signal.SIGPROF:
        return Refused(400, f"the request takes more than {seconds:g} s to read; give a shorter one")
    return _out_of_memory()


def _out_of_memory() -> Refused:
    return Refused(400, f"the request takes more than {_MEMORY >> 20} MiB to read; give a shorter one")


def _work(pipe: Connection, tokenizer: Tokenizer, limits: Limits) -> None:
    """The reader process: its forks read. When a fork exceeds its limits, the next one starts at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer.encode("a")  # imports libraries before memory is limited
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ConnectionError):  # the server has ended
        pipe.send(True)
        while True:
            if not (fork := os.fork()):
                _serve(pipe, tokenizer, limits)
            status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            if not status:  # the server has ended
                return
            pipe.send(status)


def _serve(pipe: Connection, tokenizer: Tokenizer, limits: Limits) -> NoReturn:
    """The fork: reads until the server ends."""
    status = 1
    try:
        _limit_memory()
        while True:
            kind, data, seconds = pipe.recv()
            pipe.send(_read_within(kind, data, seconds, tokenizer, limits))
    except (EOFError, ConnectionError):  # reset, if the server left an answer unread
        status = 0
    finally:
        os._exit(status)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory if most == resource.RLIM_INFINITY else min(memory, most), most))


def _read_within(kind: type[AnyBody], data: bytes, seconds: float, tokenizer: Tokenizer, limits: Limits) -> object:
    """The result or error of `read`. Linux kills this fork when its CPU time is used up."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return read(kind, data, tokenizer, limits)
    except Refused as error:
        return error
    except MemoryError:
        return _out_of_memory()
    except BaseException as error:  # a panic in tokenizers is not an Exception
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Refused(400, f"{kind.said}: the tokenizer fails ({why})", param=kind.said)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
