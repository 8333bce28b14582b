"""Runs an engine on all ranks in lockstep: rank 0 broadcasts new requests, and every rank does the same work."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.runtime.comm.host_sockets import Exchange, HostSockets

from .engine import Engine
from .faults import MISTAKE, log_fault
from .request import Request, RequestOutput
from .rules import Rules

_LONG = timedelta(days=3650)  # idle ranks wait for rank 0


class RankLoop:
    """Every rank of the world creates one. Rank 0 calls `turn` and finally `end`, the other ranks `follow`.

    A turn has one broadcast of 16 bytes, and another one if requests arrive. An idle engine sends nothing. The recorder
    counts turns as iterations: between them rank 0 may take any time, and the other ranks wait for it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._chosen = 0  # a checksum of all tokens and finish reasons
        # On the host, so that no GPU busy-waits for requests.
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=_LONG) if several else None
        self._sockets = HostSockets.connect(self._group) if self._group else None
        _begin_turn("idle")

    def turn(
        self, requests: Sequence[Request] = (), cancelled: Sequence[str] = (), released: Sequence[str] = ()
    ) -> list[RequestOutput]:
        """Add and cancel requests, release handed sequences, and make one step, if there is work.

        A request that the engine rejects ends with an error.
        """
        if not (requests or cancelled or released) and self.engine.idle:
            return []
        arrivals: dict[str, Any] = {}
        if requests or cancelled or released:
            plain = [_plain(request) for request in requests]
            arrivals = {"requests": plain, "cancelled": [*cancelled], "released": [*released]}
        recorder.enter("arrivals")
        self._send(arrivals)
        outputs = self._step(arrivals)
        _begin_turn("idle")
        return outputs

    def end(self) -> None:
        """Make the other ranks return from `follow`."""
        recorder.enter("end")
        self._send({"end": True})

    def follow(self) -> None:
        """Do the same work as rank 0, until it ends.

        Raises:
            RuntimeError: this rank generated other tokens than rank 0, or ended other texts.
        """
        recorder.enter("arrivals")
        while not (arrivals := self._receive()).get("end"):
            self._step(arrivals)
            _begin_turn("arrivals")

    def _step(self, arrivals: dict[str, Any]) -> list[RequestOutput]:
        recorder.enter("forward")
        for plain in arrivals.get("requests", ()):
            self._add(plain)
        for name in arrivals.get("cancelled", ()):
            self.engine.cancel(name)
        for handoff in arrivals.get("released", ()):
            self.engine.release(handoff)
        outputs = self.engine.step()
        told = []
        for output in outputs:
            chosen = [token.id for token in output.tokens]
            told.append((output.request, chosen, output.finish))
        self._chosen = zlib.crc32(repr(told).encode(), self._chosen)
        return outputs

    def _add(self, plain: dict[str, Any]) -> None:
        try:
            self.engine.add(_request(plain))
        except UsageError as error:
            self.engine.refuse(plain["name"], str(error))
        except Exception as error:
            log_fault(plain["name"], error)
            self.engine.refuse(plain["name"], MISTAKE)

    def _send(self, arrivals: dict[str, Any]) -> None:
        if not self._group:
            return
        data = json.dumps(arrivals).encode() if arrivals else b""
        self._broadcast(torch.tensor([len(data), self._chosen]))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _receive(self) -> dict[str, Any]:
        sent = torch.zeros(2, dtype=torch.int64)
        self._broadcast(sent)
        length, chosen = sent.tolist()
        if chosen != self._chosen:  # the next pass would be wrong or hang
            raise RuntimeError("this rank generated other tokens than rank 0, or ended other texts")
        if not length:
            return {}
        data = torch.empty(length, dtype=torch.uint8)
        self._broadcast(data)
        return json.loads(data.numpy().tobytes())

    def _broadcast(self, data: torch.Tensor) -> None:
        """Sends rank 0's `data` to the others, into theirs."""
        if not self._sockets:
            dist.broadcast(data, 0, group=self._group)
        elif dist.get_rank() == 0:
            Exchange(self._sockets, dict.fromkeys(self._sockets.links, data), {}).wait()
        else:
            Exchange(self._sockets, {}, {0: data}).wait()


def _begin_turn(phase: str) -> None:
    recorder.enter(phase, recorder.position.iteration + 1)


def _plain(request: Request) -> dict[str, Any]:
    return {**asdict(request), "params": request.params.serialize()}


def _request(plain: dict[str, Any]) -> Request:
    params, rules = SamplingParams.deserialize(plain["params"]), Rules(**plain["rules"])
    return Request(**{**plain, "params": params, "rules": rules})
