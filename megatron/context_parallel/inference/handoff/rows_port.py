"""The thread of a rank that sends rows of handed sequences to decoders."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.context_parallel.integration.vllm.wire import (
    HELLO_BYTES,
    Kind,
    Report,
    WireError,
    frame,
    plain_frame,
    read_hello,
)

from .leases import Leases
from .sequences import Closed, HandedSequences, Reading

log = logging.getLogger(__name__)
_CONNECTIONS = 512  # at most at once; further ones are closed
_HELLO_SECONDS = 10  # for a decoder to say what it wants
_OPEN_SECONDS = 5  # a rank may learn of a sequence a little later than rank 0
_SEND_SECONDS = 30  # for a decoder to take a frame
_WAIT_SECONDS = 1.0  # after which a rank without new rows says that it is there
_UNKNOWN = "no sequence of this id: it was never handed over, or its lease has ended"


@dataclass(frozen=True)
class RowsFormat:
    """What each rank sends of a row.

    Attributes:
        layers: number of layers; first_head, heads: the key/value heads of this rank.
        key_dim, value_dim: values per head of keys and of values.
        dtype: that of keys and values, such as "bfloat16".
    """

    layers: int
    first_head: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str


class RowsPort:
    """Answers decoders in a thread of its own. Only it knows asyncio; the main thread never waits for a decoder.

    Args:
        sequences: what this rank has to give.
        rows: their format.
        listener: a listening socket.
        leases: on rank 0, the leases of all sequences.
        report: on rank 0, gets the report of each worker of a decoder.
    """

    def __init__(
        self,
        sequences: HandedSequences,
        rows: RowsFormat,
        listener: socket.socket,
        leases: Leases | None = None,
        report: Callable[[Report], object] = lambda report: None,
    ) -> None:
        self.sequences, self.rows, self.leases, self.report = sequences, rows, leases, report
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._connections = set[asyncio.Task]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answers while the block runs."""
        thread = threading.Thread(target=self._run, name="rows", daemon=True)
        thread.start()
        call = self._loop.call_soon_threadsafe
        self.sequences.changed = lambda: call(self._wake)
        if self.leases is not None:
            begin = self.leases.begin
            self.sequences.opened = lambda name: call(begin, name)
        try:
            yield
        finally:
            self.sequences.changed = lambda: None
            self.sequences.opened = lambda name: None
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connect, sock=self._listener, limit=HELLO_BYTES)
        )
        watching = self._loop.create_task(self._watch_leases())
        self._loop.run_forever()
        server.close()
        tasks = [watching, *self._connections]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _wake(self) -> None:
        """Wake all who wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _watch_leases(self) -> None:
        while self.leases is not None:
            self.leases.end_late_ones()
            await asyncio.sleep(min(1.0, self.leases.seconds / 4))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        if len(self._connections) >= _CONNECTIONS:
            log.warning("rows: more than %d connections, one was closed", _CONNECTIONS)
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, EOFError) as error:
            log.info("rows: a decoder's connection ended (%s)", type(error).__name__)
        except WireError as error:
            log.warning("rows: %s", error)
        except asyncio.CancelledError:  # the port ends; asyncio of Python 3.11 would print a traceback
            log.info("rows: a decoder's connection is closed, because this rank ends")
        finally:
            self._connections.discard(task)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # the decoder does not take the rest
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = read_hello(await self._line(reader, _HELLO_SECONDS))
        try:
            if "worker" in hello:
                await self._hold(hello, reader, writer)
                return
            first, heads = self._wanted(hello)
            reading = await self._find(hello["id"])
            await self._send_all(reading, first, heads, writer)
        except Closed as closed:
            await _send(writer, plain_frame(Kind.FAULT, why=str(closed)))
        except WireError as error:
            await _send(writer, plain_frame(Kind.FAULT, why=str(error)))
            raise

    async def _line(self, reader: asyncio.StreamReader, seconds: float) -> bytes:
        """The next line; empty at the end. Raises TimeoutError, or WireError if it is too long."""
        try:
            return await asyncio.wait_for(reader.readline(), seconds)
        except ValueError:
            raise WireError(f"a line of more than {HELLO_BYTES} bytes") from None

    async def _find(self, name: str) -> Reading:
        end = self._loop.time() + _OPEN_SECONDS
        while not (reading := self.sequences.find(name)):
            if (left := end - self._loop.time()) <= 0:
                raise Closed(_UNKNOWN)
            await self._change(left)
        return reading

    async def _change(self, seconds: float) -> bool:
        """Whether something changed within so many seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _wanted(self, hello: Mapping[str, Any]) -> tuple[int, slice]:
        """The first position that a decoder wants, and which of this rank's heads. Raises WireError."""
        heads: Any = hello.get("heads")
        first: Any = hello.get("first")
        numbers = [first, *heads] if isinstance(heads, list) and len(heads) == 2 else [None]
        if not all(type(x) is int and x >= 0 for x in numbers):
            raise WireError("a hello without the first position and the heads")
        begin, end = (head - self.rows.first_head for head in heads)
        if not 0 <= begin < end <= self.rows.heads:
            raise WireError(f"heads {heads[0]} to {heads[1] - 1}: this rank has {self.rows}")
        return first, slice(begin, end)

    async def _send_all(self, reading: Reading, first: int, heads: slice, writer: asyncio.StreamWriter) -> None:
        """Send all rows from `first` on, each piece as soon as it is finished."""
        count = heads.stop - heads.start
        told = {"first_head": self.rows.first_head + heads.start, "heads": count, "tokens": reading.tokens}
        facts = {name: getattr(self.rows, name) for name in ("layers", "key_dim", "value_dim", "dtype")}
        await _send(writer, plain_frame(Kind.HEADER, **told, **facts))
        sent = 0
        while True:
            changed = self._changed
            known, all_finished = reading.pieces()
            while sent < known:
                await self._send_piece(reading, sent, first, heads, writer)
                sent += 1
            if all_finished:
                break
            if not changed.is_set() and not await self._change(_WAIT_SECONDS):
                await _send(writer, frame(Kind.WAIT))
        await _send(writer, frame(Kind.END))

    async def _send_piece(
        self, reading: Reading, piece: int, first: int, heads: slice, writer: asyncio.StreamWriter
    ) -> None:
        positions = reading.positions(piece, first)
        if not len(positions):
            return
        await _send(writer, frame(Kind.POSITIONS, positions.astype("<i4").tobytes(), rows=len(positions)))
        for layer in range(self.rows.layers):
            rows = reading.rows(piece, first, layer, heads)
            await _send(writer, frame(Kind.ROWS, rows, layer, len(positions)))

    async def _hold(self, hello: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Renew a lease at each line of a decoder's worker; the last one reports how it ended."""
        if self.leases is None:
            raise WireError("a lease is kept by the first rank of a ticket")
        name, worker = hello["id"], hello["worker"]
        if not (isinstance(worker, list) and len(worker) == 2 and all(type(x) is int for x in worker)):
            raise WireError("a hello without the number of the worker")
        if name not in self.leases:
            raise Closed(_UNKNOWN)
        await _send(writer, frame(Kind.WAIT))
        self.leases.renew(name)
        while line := await self._line(reader, self.leases.seconds):
            self.leases.renew(name)
            if line != b"\n":
                self.report(Report.of(read_hello(line)))
                self.leases.report(name, *worker)
                return


async def _send(writer: asyncio.StreamWriter, parts: list[bytes | memoryview]) -> None:
    """Send a frame. Raises TimeoutError if the decoder does not take it."""
    for part in parts:
        if len(part):
            writer.write(part)
    await asyncio.wait_for(writer.drain(), _SEND_SECONDS)
