"""Opens the ports at which ranks serve rows to decoders, and makes the tickets for them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.generation.flags import Serve
from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.handoff.leases import Leases
from megatron.context_parallel.inference.handoff.rows_port import RowsFormat, RowsPort
from megatron.context_parallel.inference.handoff.sequences import HandedSequences
from megatron.context_parallel.inference.request import Request
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.integration.huggingface.config import read_config
from megatron.context_parallel.integration.vllm.identity import identity
from megatron.context_parallel.integration.vllm.wire import Place, Ticket, digest_of_tokens

from .listen import bind
from .worker import Worker

_ALL = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Tickets:
    """Makes the tickets of this server.

    Attributes:
        model: the `identity` of the model.
        places: where the ranks serve their rows.
    """

    model: dict[str, Any]
    places: tuple[Place, ...]

    def params(self, request: Request) -> dict[str, Any]:
        """The `kv_transfer_params` of the answer to a request whose sequence is handed over."""
        digest = digest_of_tokens(request.tokens)
        return Ticket(request.handoff, len(request.tokens), digest, self.model, self.places).params()


@contextmanager
def serving_rows(engine: Engine, flags: Serve, worker: Worker | None = None) -> Iterator[Tickets | None]:
    """Serve the rows of this rank while the block runs, if the flags ask for it. Every rank calls it.

    Args:
        engine: the engine over a `Session`.
        flags: those of the server.
        worker: that of rank 0.

    Raises:
        UsageError: the address is not available, or layers have different heads.
    """
    if flags.handoff_host is None:
        yield None
        return
    session = engine.cache
    assert isinstance(session, Session)
    rows = _format(session)
    port = flags.handoff_port and flags.handoff_port + int(os.environ.get("LOCAL_RANK", "0"))
    listener = bind(flags.handoff_host, port, "--handoff-port")
    places = _everyones(_place(listener, flags.handoff_host, session, rows))
    engine.handed = HandedSequences(session.tables, session.cache, session.cp.rank)
    if worker is None:
        with RowsPort(engine.handed, rows, listener).running():
            yield None
        return
    metrics = worker.metrics

    def release(name: str, late: bool) -> None:
        metrics.handoffs.labels("expired" if late else "reported").inc()
        worker.release(name)

    folder = Path(flags.load)
    model = identity(read_config(folder), rows.dtype, folder)
    leases = Leases(flags.handoff_seconds, release)
    with RowsPort(engine.handed, rows, listener, leases, metrics.handed).running():
        yield Tickets(model, places)


def _format(session: Session) -> RowsFormat:
    shapes = {(keys.shape[2:], values.shape[2:], keys.dtype) for keys, values in session.cache.layers}
    if len(shapes) > 1:
        raise UsageError("--handoff-host: layers have different heads; serve a model whose layers are alike")
    ((keys, values, dtype),) = shapes
    groups = session.model.config.num_query_groups
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_tensor_model_parallel_rank() * groups // tensor
    layers = len(session.cache.layers)
    return RowsFormat(layers, first, keys[0], keys[1], values[1], str(dtype).removeprefix("torch."))


def _place(listener: socket.socket, host: str, session: Session, rows: RowsFormat) -> Place:
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname()) if host in _ALL else host
    return Place(name, listener.getsockname()[1], session.cp.rank, rows.first_head, rows.heads)


def _everyones(place: Place) -> tuple[Place, ...]:
    """The places of all ranks, rank 0 first."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (place,)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    return tuple(places)
