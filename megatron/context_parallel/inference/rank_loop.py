"""One engine on all ranks in step: rank 0 says what arrives, and every rank does the same."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.sampling_params import SamplingParams

from .engine import Engine, Output, Request

_LONG = timedelta(days=3650)  # idle ranks wait for rank 0


class RankLoop:
    """Every rank of the world makes one; rank 0 calls `turn` and at last `end`, the others `follow`.

    A turn has one broadcast of 8 bytes, and another if something arrives. An idle engine has none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # On the host, so that no GPU spins while nothing arrives.
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=_LONG) if several else None

    def turn(self, requests: Sequence[Request] = (), cancelled: Sequence[str] = ()) -> list[Output]:
        """Let requests join and others leave, and make one step, if there is anything to do.

        `Engine.check` must have accepted the requests.
        """
        if not (requests or cancelled) and self.engine.idle:
            return []
        arrivals: dict[str, Any] = {}
        if requests or cancelled:
            arrivals = {"requests": [_plain(request) for request in requests], "cancelled": [*cancelled]}
        self._send(arrivals)
        return self._step(arrivals)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        self._send({"end": True})

    def follow(self) -> None:
        """Do what rank 0 does, until it ends."""
        while not (arrivals := self._receive()).get("end"):
            self._step(arrivals)

    def _step(self, arrivals: dict[str, Any]) -> list[Output]:
        for request in arrivals.get("requests", ()):
            self.engine.add(_request(request))
        for name in arrivals.get("cancelled", ()):
            self.engine.cancel(name)
        return self.engine.step()

    def _send(self, arrivals: dict[str, Any]) -> None:
        if not self._group:
            return
        data = json.dumps(arrivals).encode() if arrivals else b""
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._group)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._group)

    def _receive(self) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._group)
        if not length:
            return {}
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        return json.loads(data.numpy().tobytes())


def _plain(request: Request) -> dict[str, Any]:
    return {**asdict(request), "params": request.params.serialize()}


def _request(plain: dict[str, Any]) -> Request:
    return Request(**{**plain, "params": SamplingParams.deserialize(plain["params"])})
