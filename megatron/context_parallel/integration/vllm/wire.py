"""The protocol between a rank that has rows of a sequence and a decoder: a ticket, a hello, and frames.

A decoder gets a ticket over HTTP. It connects to each rank of the ticket and sends a hello, a line of JSON with the id
of the ticket. The rank answers with frames. A frame is a header, then its payload; its checksum covers both.

    HEADER     JSON: what the rank is about to send, as in the ticket
    POSITIONS  int32 [rows]: the positions of the next rows
    ROWS       keys [rows, heads, key_dim] and then values [rows, heads, value_dim] of one layer at these positions
    WAIT       nothing: the prefill has not come further, but the rank is there; also: the lease is there
    END        nothing: all rows were sent
    FAULT      JSON: why the rank sends no more

After POSITIONS there are as many ROWS as layers. Numbers of payloads are little-endian. A rank's rows come in pieces of
at most `PIECE` rows; ranks with other heads of the same rows send the same pieces.
"""

import hashlib
import json
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

VERSION = 1
PIECE = 256  # rows
HELLO_BYTES = 4096  # at most, with the line break
PLAIN_BYTES = 1 << 16  # at most, of a HEADER or FAULT
FIELD = "context_parallel"  # of kv_transfer_params
_PLACES = 4096  # ranks of a ticket, at most
_HEADER = struct.Struct("<BHIQI")  # kind, layer, rows, bytes of the payload, checksum


class WireError(Exception):
    """What came is not what this protocol allows, or was damaged. The message is one line."""


class Kind(IntEnum):
    HEADER = 1
    POSITIONS = 2
    ROWS = 3
    WAIT = 4
    END = 5
    FAULT = 6


@dataclass(frozen=True)
class Frame:
    """One frame. `layer` counts from 0 and, like `rows`, is 0 where it says nothing."""

    kind: Kind
    layer: int
    rows: int
    payload: bytes | bytearray | memoryview

    def plain(self) -> dict[str, Any]:
        """The fields of a payload of JSON. Raises WireError if it has none."""
        return _fields(self.payload)


@dataclass(frozen=True)
class Place:
    """Where a rank serves its rows.

    Attributes:
        host, port: the address.
        part: which rows it has; places with the same part have other heads of the same rows.
        first_head, heads: its key/value heads.
    """

    host: str
    port: int
    part: int
    first_head: int
    heads: int


@dataclass(frozen=True)
class Ticket:
    """What a decoder must know to fetch a sequence.

    Attributes:
        id: names the sequence; nobody can guess it.
        tokens: the number of prompt tokens, whose rows can be fetched.
        tokens_digest: `digest_of_tokens` of them.
        model: `identity` of the model.
        places: the ranks. The first one also keeps the lease.
    """

    id: str
    tokens: int
    tokens_digest: str
    model: dict[str, Any]
    places: tuple[Place, ...]

    def params(self) -> dict[str, Any]:
        """It as `kv_transfer_params` of an answer."""
        return {"do_remote_prefill": True, "do_remote_decode": False, FIELD: {"version": VERSION, **asdict(self)}}

    @classmethod
    def of(cls, params: object) -> "Ticket | None":
        """The ticket in the `kv_transfer_params` of a request; None if they have none.

        Raises:
            WireError: it is not a ticket of this version.
        """
        given = params.get(FIELD) if isinstance(params, dict) and params.get("do_remote_prefill") else None
        if given is None:
            return None
        try:
            fields = dict(given)
            if (version := fields.pop("version")) != VERSION:
                raise WireError(f"ticket of version {version!r:.20}: this connector reads version {VERSION}")
            places = tuple(Place(**place) for place in fields.pop("places"))
            ticket = cls(**fields, places=places)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"damaged ticket ({type(error).__name__})") from None
        ticket._check()
        return ticket

    def _check(self) -> None:
        texts = [self.id, self.tokens_digest, *[place.host for place in self.places]]
        counts = [self.tokens]
        for place in self.places:
            counts += [place.port, place.part, place.first_head, place.heads]
        right = all(isinstance(x, str) for x in texts) and all(type(x) is int and x >= 0 for x in counts)
        if not (right and 0 < len(self.places) <= _PLACES and isinstance(self.model, dict)):
            raise WireError("damaged ticket (a field has another type, or too many places)")


@dataclass(frozen=True)
class Report:
    """The last line of a worker of a decoder: what it received of all ranks, and why it gave up, if it did."""

    rows: int
    nbytes: int
    seconds: float
    error: str = ""

    def line(self, ticket: str) -> bytes:
        """It as a line."""
        return hello(id=ticket, **asdict(self))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Report":
        """The report in the fields of a line. Raises WireError if there is none."""
        numbers: list[Any] = [fields.get(name) for name in ("rows", "nbytes", "seconds")]
        if not all(type(x) in (int, float) and 0 <= x < 2**63 for x in numbers):
            raise WireError("damaged report of a decoder")
        rows, size, seconds = numbers
        return cls(rows, size, seconds, str(fields.get("error", ""))[:200])


def digest_of_tokens(tokens: Sequence[int]) -> str:
    """A digest of tokens in their order, in hexadecimal."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


def hello(**fields: Any) -> bytes:
    """The line that a decoder sends first."""
    return json.dumps({"version": VERSION, **fields}).encode() + b"\n"


def read_hello(line: bytes) -> dict[str, Any]:
    """The fields of a hello. Raises WireError if it is none of this version."""
    fields = _fields(line)
    if fields.get("version") != VERSION or not isinstance(fields.get("id"), str):
        raise WireError(f"no hello of version {VERSION}")
    return fields


def frame(kind: Kind, payload: bytes | memoryview = b"", layer: int = 0, rows: int = 0) -> list[bytes | memoryview]:
    """A frame as the parts to send, one after the other; the payload is not copied."""
    head = _HEADER.pack(kind, layer, rows, len(payload), 0)
    checksum = zlib.crc32(payload, zlib.crc32(head))
    return [_HEADER.pack(kind, layer, rows, len(payload), checksum), payload]


def plain_frame(kind: Kind, **fields: Any) -> list[bytes | memoryview]:
    """A frame with fields as JSON."""
    return frame(kind, json.dumps(fields).encode())


def read_frame(receive: Callable[[int], bytearray], most: int) -> Frame:
    """The next frame.

    Args:
        receive: returns so many bytes, all of them.
        most: maximum bytes of its payload.

    Raises:
        WireError: it is too large or damaged.
    """
    head = receive(_HEADER.size)
    kind, layer, rows, size, checksum = _HEADER.unpack(head)
    if kind not in Kind.__members__.values() or size > most:
        raise WireError(f"frame of kind {kind} with {size} bytes: not part of the protocol")
    payload = receive(size)
    if zlib.crc32(payload, zlib.crc32(_HEADER.pack(kind, layer, rows, size, 0))) != checksum:
        raise WireError("a frame was damaged on the way: its checksum differs")
    return Frame(Kind(kind), layer, rows, payload)


def _fields(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(data))
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise WireError("a message is not an object of JSON")
    return fields
