"""Stands between a decoder and a rank, and spoils what the rank sends."""

import copy
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

FIELD = "context_parallel"  # of a ticket
MIDDLE = 100_000  # bytes of a stream: about a third of a rank's rows of the longest prompt
Spoil = Callable[[bytearray, int], bytes | None]  # what passes of the bytes that came after so many; None: the end


class Relay:
    """Listens at `port`, and forwards what passes."""

    def __init__(self, host: str, port: int, spoil: Spoil) -> None:
        self._rank, self._spoil = (host, port), spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            decoder, _ = self._listener.accept()
            rank = socket.create_connection(self._rank)
            threading.Thread(target=self._forward, args=(decoder, rank), daemon=True).start()
            threading.Thread(target=self._return, args=(rank, decoder), daemon=True).start()

    def _forward(self, decoder: socket.socket, rank: socket.socket) -> None:
        try:
            while data := decoder.recv(4096):
                rank.sendall(data)
            rank.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _return(self, rank: socket.socket, decoder: socket.socket) -> None:
        passed = 0
        try:
            while data := rank.recv(4096):
                sent = self._spoil(bytearray(data), passed)
                if sent is None:
                    break
                decoder.sendall(sent)
                passed += len(data)
        except OSError:
            pass
        with suppress(OSError):  # it has gone
            decoder.shutdown(socket.SHUT_RDWR)  # another thread still waits for it


def through(params: dict, rank: int, spoil: Spoil) -> dict:
    """A ticket whose rows of one rank go through a relay."""
    spoiled = copy.deepcopy(params)
    place = spoiled[FIELD]["places"][rank]
    relay = Relay(place["host"], place["port"], spoil)
    place |= {"host": "127.0.0.1", "port": relay.port}
    return spoiled


def cut(data: bytearray, passed: int) -> bytes | None:
    return None if passed > MIDDLE else bytes(data)


def damage(data: bytearray, passed: int) -> bytes | None:
    if passed <= MIDDLE < passed + len(data):
        data[0] ^= 1
    return bytes(data)


class Hang:
    """Nothing passes after so many bytes, for a minute; then `begun` is set."""

    def __init__(self, after: int = MIDDLE) -> None:
        self._after = after
        self.begun = threading.Event()

    def __call__(self, data: bytearray, passed: int) -> bytes | None:
        if passed >= self._after:
            self.begun.set()
            time.sleep(60)
        return bytes(data)
