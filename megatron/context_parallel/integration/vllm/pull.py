"""Fetches the rows of one sequence from all ranks of a ticket at once, in threads."""

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy
import torch
from torch import Tensor

from .wire import PIECE, PLAIN_BYTES, Frame, Kind, Place, Report, Ticket, WireError, hello, read_frame

_CONNECT_SECONDS = 5
_SIGN_SECONDS = 1.0  # between two signs for the lease
Write = Callable[[int, Tensor, Tensor, Tensor], object]


class PullError(Exception):
    """Rows did not come. The message is one line."""


class Refusal(PullError):
    """A rank says that it has no such rows, or that they are wrong."""


class Pull:
    """Rows of a sequence on their way.

    Attributes:
        came: bool [tokens - first]: which rows were written, in all layers.
        report: what came, when `run` has returned.

    Args:
        ticket: names the sequence.
        first: the first position that is wanted.
        heads: the first key/value head that is wanted, and the one after the last.
        write: called with (layer, positions int64 [rows], keys, values [rows, heads, d]), in several threads.
        worker: number of this worker of the decoder, and of all of them.
        silence: seconds without any byte after which a rank is given up.
    """

    def __init__(
        self,
        ticket: Ticket,
        first: int,
        heads: tuple[int, int],
        write: Write,
        worker: tuple[int, int] = (0, 1),
        silence: float = 30.0,
    ) -> None:
        self.ticket, self.first, self.heads, self.write, self.worker = ticket, first, heads, write, worker
        self.silence = silence
        self.came = numpy.zeros(ticket.tokens - first, dtype=bool)
        self.report = Report(0, 0, 0.0)
        self._bytes = 0
        self._error = ""
        self._untrusted = False
        self._lock = threading.Lock()
        self._sockets = list[socket.socket]()
        self._ended = False
        self._signed = 0.0
        self._lease: socket.socket | None = None

    def run(self) -> None:
        """Fetch all rows, or as many as come; `report.error` says why rows are missing. It raises nothing."""
        begin = time.monotonic()
        try:
            lease = self._connect(self.ticket.places[0])
            _hold(lease, self.ticket, self.worker)
            self._lease = lease
            parts = [threading.Thread(target=self._fetch, args=(places,)) for places in self._parts()]
            for thread in parts:
                thread.start()
            for thread in parts:
                thread.join()
            if not self._error and not self.came.all():
                self._fail(f"{int((~self.came).sum())} rows of {len(self.came)} were not sent")
        except Exception as error:
            self._fail(_said(error))
        self.report = Report(int(self.came.sum()), self._bytes, time.monotonic() - begin, self._error)
        self._end()

    def cancel(self, why: str) -> None:
        """Give up; `run` returns soon."""
        self._fail(why)

    def first_missing(self) -> int:
        """The position of the first row that cannot be used; the number of tokens if all can.

        After a refusal or a damaged frame, no row is used.
        """
        if self._untrusted:
            return self.first
        missing = numpy.flatnonzero(~self.came)
        return self.first + int(missing[0]) if len(missing) else self.ticket.tokens

    # -- connections ---------------------------------------------------------------------------------------------------

    def _parts(self) -> list[list[Place]]:
        """For each part of the rows, the ranks that together have the wanted heads, in order."""
        by_part = defaultdict[int, list[Place]](list)
        for place in self.ticket.places:
            by_part[place.part].append(place)
        return [self._covering(places) for places in by_part.values()]

    def _covering(self, places: Sequence[Place]) -> list[Place]:
        next_head, end = self.heads
        chosen = list[Place]()
        for place in sorted(places, key=lambda place: place.first_head):
            if place.first_head <= next_head < min(end, place.first_head + place.heads):
                chosen.append(place)
                next_head = place.first_head + place.heads
        if next_head < end:
            raise PullError(f"no rank of the ticket has head {next_head}")
        return chosen

    def _connect(self, place: Place) -> socket.socket:
        with self._lock:
            if self._ended:
                raise PullError(self._error)
        connection = _connection(place, self.silence)
        with self._lock:
            self._sockets.append(connection)
            ended = self._ended
        if ended:
            connection.close()
            raise PullError(self._error)
        return connection

    def _fail(self, why: str) -> None:
        """Record the first reason, and wake all threads that wait for bytes."""
        with self._lock:
            self._error = self._error or why
            self._ended = True
            others = [connection for connection in self._sockets if connection is not self._lease]
        for connection in others:
            with suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        """Tell rank 0 how it ended, and close everything."""
        if self._lease:
            with suppress(OSError):  # then the lease ends by time
                self._lease.sendall(self.report.line(self.ticket.id))
        for connection in self._sockets:
            connection.close()

    def _sign(self) -> None:
        """Renew the lease, at most once a second."""
        with self._lock:
            now = time.monotonic()
            due = now - self._signed >= _SIGN_SECONDS
            self._signed = now if due else self._signed
        if due and self._lease:
            try:
                self._lease.sendall(b"\n")
            except OSError:
                raise PullError("the rank that keeps the lease has ended the connection") from None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _fetch(self, places: Sequence[Place]) -> None:
        """Fetch the rows of one part, from the ranks that have its heads."""
        try:
            streams = [_Stream(self._connect(place), self._asked(place), self) for place in places]
            while len(positions := self._positions(streams)):
                for layer in range(streams[0].layers):
                    self._rows(streams, layer, positions)
                with self._lock:
                    self.came[positions.numpy() - self.first] = True
        except Exception as error:
            self._untrusted |= isinstance(error, Refusal | WireError)
            self._fail(_said(error))

    def _asked(self, place: Place) -> tuple[int, int]:
        return max(self.heads[0], place.first_head), min(self.heads[1], place.first_head + place.heads)

    def _positions(self, streams: "Sequence[_Stream]") -> Tensor:
        """The positions int64 [rows] of the next piece, alike for all streams; empty at their end."""
        frames = [stream.next(Kind.POSITIONS, Kind.END) for stream in streams]
        if any(frame.kind is not frames[0].kind or frame.payload != frames[0].payload for frame in frames):
            raise WireError("ranks with other heads of the same rows send other rows")
        if frames[0].kind is Kind.END:
            return torch.empty(0, dtype=torch.int64)
        if not 0 < len(frames[0].payload) <= 4 * PIECE:
            raise WireError(f"positions of {len(frames[0].payload)} bytes")
        positions = torch.from_numpy(numpy.frombuffer(frames[0].payload, "<i4").astype(numpy.int64))
        low, high = int(positions[0]), int(positions[-1])
        ascending = bool((positions[1:] > positions[:-1]).all())
        if not (ascending and self.first <= low and high < self.ticket.tokens):
            raise WireError(f"rows {low} to {high}: not those of the ticket, or not in order")
        if self.came[positions.numpy() - self.first].any():
            raise WireError("a row was sent twice")
        return positions

    def _rows(self, streams: "Sequence[_Stream]", layer: int, positions: Tensor) -> None:
        keys, values = list[Tensor](), list[Tensor]()
        for stream in streams:
            own_keys, own_values = stream.rows(layer, len(positions))
            keys.append(own_keys)
            values.append(own_values)
        if len(streams) == 1:
            self.write(layer, positions, keys[0], values[0])
        else:
            self.write(layer, positions, torch.cat(keys, 1), torch.cat(values, 1))

    def _count(self, received: int) -> None:
        with self._lock:
            self._bytes += received
        self._sign()


class _Stream:
    """The frames of one rank.

    Raises:
        WireError: the rank has another sequence, model or dtype than its ticket says.
        PullError: the rank sends nothing more.
    """

    def __init__(self, connection: socket.socket, heads: tuple[int, int], pull: Pull) -> None:
        self._connection, self._pull = connection, pull
        ticket, model = pull.ticket, pull.ticket.model
        connection.sendall(hello(id=ticket.id, first=pull.first, heads=heads))
        told = self.next(Kind.HEADER).plain()
        self.layers, self.heads, self.head_dim = model["num_hidden_layers"], heads[1] - heads[0], model["head_dim"]
        expected = {
            "first_head": heads[0],
            "heads": self.heads,
            "tokens": ticket.tokens,
            "layers": self.layers,
            "key_dim": self.head_dim,
            "value_dim": self.head_dim,
            "dtype": model["dtype"],
        }
        if told != expected:
            raise WireError(f"a rank sends {told}, but its ticket says {expected}"[:400])
        self.dtype = getattr(torch, model["dtype"])

    def next(self, *kinds: Kind) -> Frame:
        """The next frame, of one of these kinds, after any WAIT."""
        most = PLAIN_BYTES
        if Kind.ROWS in kinds:
            most = 2 * PIECE * self.heads * self.head_dim * self.dtype.itemsize
        while True:
            frame = _read(self._connection, most)
            self._pull._count(len(frame.payload) if frame.kind is Kind.ROWS else 0)
            if frame.kind in kinds:
                return frame
            if frame.kind is not Kind.WAIT:
                raise WireError(f"{frame.kind.name} instead of {kinds[0].name}")

    def rows(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values [count, heads, d] of a layer."""
        frame = self.next(Kind.ROWS)
        size = count * self.heads * self.head_dim * self.dtype.itemsize
        if (frame.layer, frame.rows, len(frame.payload)) != (layer, count, 2 * size):
            raise WireError(f"layer {frame.layer} with {frame.rows} rows instead of layer {layer} with {count}")
        both = torch.frombuffer(frame.payload, dtype=self.dtype).view(2, count, self.heads, self.head_dim)
        return both[0], both[1]


def give_back(ticket: Ticket, why: str) -> None:
    """Tell rank 0 that no worker wants the rows of a ticket, so that its lease ends at once. It raises nothing."""
    with suppress(PullError, WireError, OSError), _connection(ticket.places[0], _CONNECT_SECONDS) as lease:
        _hold(lease, ticket, (0, 1))
        lease.sendall(Report(0, 0, 0.0, why).line(ticket.id))


def _connection(place: Place, silence: float) -> socket.socket:
    """A connection to a rank. Raises PullError."""
    try:
        connection = socket.create_connection((place.host, place.port), _CONNECT_SECONDS)
    except (OSError, OverflowError, ValueError) as error:  # such as a port or a name that cannot be
        raise PullError(f"{place.host}:{place.port}: {_said(error)}") from None
    connection.settimeout(silence)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _hold(lease: socket.socket, ticket: Ticket, worker: tuple[int, int]) -> None:
    """Ask rank 0 to keep the lease of a ticket for a worker. Raises Refusal if there is none."""
    lease.sendall(hello(id=ticket.id, worker=worker))
    _read(lease, PLAIN_BYTES)  # the lease is there


def _read(connection: socket.socket, most: int) -> Frame:
    """The next frame, whose payload has at most `most` bytes. Raises Refusal for a FAULT."""
    frame = read_frame(lambda size: _receive(connection, size), most)
    if frame.kind is Kind.FAULT:
        raise Refusal(f"a rank refuses: {frame.plain().get('why')}"[:300])
    return frame


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        try:
            received = connection.recv_into(left)
        except TimeoutError:
            raise PullError(f"a rank sent nothing for {connection.gettimeout():g} s") from None
        if not received:
            raise PullError("a rank has ended the connection")
        left = left[received:]
    return data


def _said(error: Exception) -> str:
    """The reason in one line."""
    if isinstance(error, PullError | WireError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
